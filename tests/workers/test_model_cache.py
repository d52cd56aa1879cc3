"""The limit of the models' cache: what was used longest ago goes, what is in use stays, a kill leaves nothing."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner
from saggar.jobs.errors import ConfigError
from saggar.workers import model_cache, model_source
from saggar.workers.cli import cli
from saggar.workers.model_cache import held, states
from saggar.workers.model_source import local_model
from saggar.workers.settings import WorkerSettings, cache_settings

from tests.support.bucket import KB, Bucket

INDEX = json.dumps({"_class_name": "NoopPipeline", "unet": ["diffusers", "UNet"]}).encode()
SHARED = b"s" * (20 * KB)
HOLD = """
import sys
from pathlib import Path
from saggar.workers.model_cache import using
with using(Path(sys.argv[1]), sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""


class Cache:
    """A cache, and the S3 that it is filled from: models of 30 KB and a little, of which `shared` is in several."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store: dict[str, Bucket] = {}
        self.told: list[str] = []

    def add(self, name: str, size: int = 30 * KB, shared: bytes | None = None) -> None:
        files = {
            "model_index.json": INDEX,
            "unet/model.safetensors": name.encode() + bytes(size - len(name)),
        }
        if shared is not None:
            files["unet/extra.json"] = shared
        url = f"s3://bucket/{name.partition('@')[0]}"
        self.store[url] = Bucket(url, files)

    def get(self, name: str, limit: int | None = 100 * KB) -> Path:
        with local_model(f"s3://bucket/{name}", self.root, self.told.append, limit) as folder:
            return Path(folder)

    def names(self) -> list[str]:
        """Of what it has, in use for longest first."""
        return [state.place.name.removeprefix("bucket--") for state in states(self.root)]

    def age(self, name: str, seconds: float) -> None:
        """The last use of its states lies so much further back."""
        for state in states(self.root):
            if state.place.name == f"bucket--{name}" and state.name is not None:
                use = state.place / "uses" / state.name
                os.utime(use, (state.used - seconds,) * 2)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    cache = Cache(tmp_path / "cache")
    monkeypatch.setattr(model_source, "open_storage", lambda url: cache.store[url])
    return cache


def filled(cache: Cache, *names: str) -> None:
    """With these, the first used longest ago."""
    for number, name in enumerate(names):
        cache.add(name)
        cache.get(name, None)
        cache.age(name, 1000 - number)


def whole(folder: Path) -> bool:
    return (folder / "model_index.json").read_bytes() == INDEX


def test_what_was_used_longest_ago_goes_first(cache: Cache) -> None:
    filled(cache, "a", "b", "c")
    assert cache.names() == ["a", "b", "c"]
    cache.get("a")  # used again
    assert cache.names() == ["b", "c", "a"]
    cache.add("d")
    cache.get("d")
    assert cache.names() == ["c", "a", "d"]
    assert held(cache.root) <= 100 * KB
    assert "removed bucket--b from the model cache: 0.0 MiB" in cache.told
    assert list((cache.root / "bucket--b").glob("*/*")) == []
    assert whole(cache.get("b")), "it is fetched again"
    assert cache.names() == ["a", "d", "b"]


def test_as_many_go_as_it_takes_and_no_more(cache: Cache) -> None:
    filled(cache, "a", "b", "c")
    cache.add("large", 60 * KB)
    cache.get("large")
    assert cache.names() == ["c", "large"]
    cache.get("c", 1 << 30)
    assert cache.names() == ["large", "c"]


def test_a_lower_limit_counts_from_the_next_use(cache: Cache) -> None:
    filled(cache, "a", "b", "c")
    cache.get("a", 40 * KB)
    assert cache.names() == ["a"]


def test_without_a_limit_nothing_goes(cache: Cache) -> None:
    filled(cache, "a", "b", "c", "d", "e")
    assert len(cache.names()) == 5


def test_states_of_one_folder_share_what_has_not_changed(cache: Cache) -> None:
    cache.add("a", shared=SHARED)
    old = cache.get("a")
    cache.age("a", 1000)
    cache.add("a@2", shared=SHARED)
    new = cache.get("a")
    assert old != new
    assert held(cache.root) < 90 * KB
    cache.get("a", 60 * KB)
    assert not old.exists()
    assert whole(new)
    assert (new / "unet" / "extra.json").read_bytes() == SHARED
    assert held(cache.root) < 60 * KB


def test_what_the_next_state_needs_is_kept_and_not_fetched_again(cache: Cache) -> None:
    """The old state goes before the new one is there."""
    cache.add("a", shared=SHARED)
    cache.get("a")
    blob = cache.root / "bucket--a" / "blobs" / f"{hashlib.md5(SHARED).hexdigest()}-{len(SHARED)}"
    before = blob.stat().st_ino
    cache.add("a@2", shared=SHARED)
    assert whole(cache.get("a", 60 * KB))
    assert blob.stat().st_ino == before
    assert len(cache.names()) == 1


def test_what_a_live_process_uses_stays(cache: Cache) -> None:
    filled(cache, "a", "b", "c")
    first = states(cache.root)[0]
    assert first.name is not None
    command = [sys.executable, "-c", HOLD, str(first.place), first.name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        cache.age("a", 10_000)  # from now, however long the process took to start
        cache.add("d")
        cache.get("d")
        assert cache.names() == ["a", "c", "d"], "the one after it went instead"
        assert [state.in_use for state in states(cache.root)] == [True, False, False]
        other.kill()
        other.wait(60)
    cache.add("e")
    cache.get("e")
    assert cache.names() == ["c", "d", "e"], "who was killed uses nothing"


def test_more_in_use_than_the_limit_is_told(cache: Cache) -> None:
    filled(cache, "a", "b", "c")
    with ExitStack() as stack:
        for name in ("a", "b", "c"):
            stack.enter_context(local_model(f"s3://bucket/{name}", cache.root, cache.told.append))
        cache.add("d")
        assert whole(cache.get("d"))
        assert len(cache.names()) == 4
        over = "the model cache is over its limit of 0.1 MiB by 0.0 MiB: the rest is in use"
        assert cache.told.count(over) == 1
    cache.get("d")
    assert len(cache.names()) == 3


def test_a_model_larger_than_the_limit_is_refused_and_costs_nothing(cache: Cache) -> None:
    filled(cache, "a")
    cache.add("large", 5 << 20)
    said = r"^SAGGAR_MODEL_CACHE_GIB or --model-cache-gib: the model takes 5\.0 MiB \(allowed: at least"
    with pytest.raises(ConfigError, match=said):
        cache.get("large", 4 << 20)
    assert cache.names() == ["a"]


def test_where_somebody_fetches_nothing_is_removed(cache: Cache) -> None:
    filled(cache, "a", "b", "c")
    with (cache.root / "bucket--a" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cache.add("d")
        cache.get("d")
    assert cache.names() == ["a", "c", "d"]


def test_what_was_interrupted_counts_and_goes_in_its_turn(cache: Cache) -> None:
    cache.add("a", 60 * KB)
    cache.store["s3://bucket/a"].broken = True
    with pytest.raises(OSError, match="the line is cut"):
        cache.get("a")
    assert held(cache.root) > 0
    (state,) = states(cache.root)
    assert (state.name, state.in_use) == (None, False)
    cache.add("b", 30 * KB)
    room = 30 * KB + len(INDEX) + held(cache.root)
    assert whole(cache.get("b", room))
    assert cache.names() == ["a", "b"]
    cache.get("b", room - 1)
    assert cache.names() == ["b"]


@pytest.mark.parametrize("step", ["rmtree", "unlink"])
def test_a_kill_amid_a_removal_is_mended_by_the_next(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    filled(cache, "a", "b", "c")

    class Killed(BaseException):
        pass

    def rmtree(_: Path) -> None:
        raise Killed

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "blobs":
            raise Killed
        made(path, missing_ok)

    cache.add("d")
    made = Path.unlink
    with monkeypatch.context() as patch:
        if step == "rmtree":
            patch.setattr(model_cache.shutil, "rmtree", rmtree)
        else:
            patch.setattr(Path, "unlink", unlink)
        with pytest.raises(Killed):
            cache.get("d")
    place = cache.root / "bucket--a"
    assert list((place / "blobs").iterdir()) != []
    assert whole(cache.get("b")) and whole(cache.get("c"))
    assert whole(cache.get("d", 70 * KB))
    assert [path.name for path in place.iterdir() if path.name not in ("lock", "uses")] == ["blobs"]
    assert list((place / "blobs").iterdir()) == []
    assert cache.names() == ["c", "d"]


def test_the_limit_is_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert WorkerSettings.load({}, {}).model_cache_bytes is None
    assert WorkerSettings.load({}, {"SAGGAR_MODEL_CACHE_GIB": "1.5"}).model_cache_bytes == 3 << 29
    assert WorkerSettings.load({"model_cache_gib": 2.0}, {}).model_cache_bytes == 2 << 30
    environ = {"SAGGAR_MODEL_CACHE": str(tmp_path), "SAGGAR_MODEL_CACHE_GIB": "2", "SAGGAR_MAX_BATCH": "none"}
    assert cache_settings(environ) == (tmp_path, 2 << 30)
    for wrong in ("0", "-1", "much", "inf", "nan"):
        with pytest.raises(ConfigError, match=r"^SAGGAR_MODEL_CACHE_GIB: .+ \(allowed: .+\)$"):
            WorkerSettings.load({}, {"SAGGAR_MODEL_CACHE_GIB": wrong})


def test_the_doctor_says_what_is_in_it(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(cache, "a", "b")
    monkeypatch.setenv("SAGGAR_MODEL_CACHE", str(cache.root))
    with local_model("s3://bucket/a", cache.root, cache.told.append):
        said = CliRunner().invoke(cli, ["doctor"]).output
    assert f"2 models from S3, 1 in use, 0.1 MiB without a limit, in {cache.root}" in said
    monkeypatch.setenv("SAGGAR_MODEL_CACHE_GIB", "20")
    assert "0 in use, 0.1 MiB of 20.0 GiB" in CliRunner().invoke(cli, ["doctor"]).output
    monkeypatch.setenv("SAGGAR_MODEL_CACHE_GIB", "no")
    assert "FAIL  model cache      SAGGAR_MODEL_CACHE_GIB: " in CliRunner().invoke(cli, ["doctor"]).output
