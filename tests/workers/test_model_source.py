"""Models in S3: fetched by the worker to a cache that workers of a machine share. A real S3 server."""

from __future__ import annotations

import fcntl
import json
import os
import random
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file
from saggar.engine.errors import LoadError
from saggar.engine.models.inspection import inspect_model
from saggar.jobs.client import JobClient
from saggar.jobs.errors import ConfigError
from saggar.jobs.settings import JobSettings
from saggar.storage.errors import InvalidKey, StorageRefused
from saggar.storage.s3 import S3Storage
from saggar.workers import model_source
from saggar.workers.cli import cli
from saggar.workers.lifecycle import ModelWorker
from saggar.workers.model_source import local_model
from saggar.workers.settings import WorkerSettings, public_name

from tests.support.bucket import Bucket
from tests.support.weed import S3Server
from tests.workers.conftest import StartWorker

INDEX = {"_class_name": "NoopPipeline", "unet": ["diffusers", "UNet"], "tokenizer": ["transformers", "T"]}
WEIGHTS = random.Random(1).randbytes(5_000_000)
FILES = {
    "model_index.json": json.dumps(INDEX).encode(),
    "unet/config.json": b"{}",
    "unet/diffusion_pytorch_model.safetensors": WEIGHTS,
    "unet/diffusion_pytorch_model.bin": b"a pickle",
    "tokenizer/merges.txt": b"a b",
    "notes/readme.txt": b"not a component's",
}
NEEDED = [name for name in sorted(FILES) if not name.endswith(".bin") and not name.startswith("notes")]
FETCH = """
import os, sys
from pathlib import Path
from saggar.workers.model_source import local_model
def tell(line):
    print(line, flush=True)
    if os.environ.get("DIE_AT", "never") in line:
        os._exit(9)
with local_model(sys.argv[1], Path(sys.argv[2]), tell) as folder:
    print(folder)
"""


def fetched(url: str, cache: Path, tell: Callable[[str], None] = print, limit: int | None = None) -> str:
    """Where it lies, given back at once."""
    with local_model(url, cache, tell, limit) as folder:
        return folder


def test_the_public_name_is_natural(tmp_path: Path) -> None:
    (tmp_path / "flux-dev").mkdir()
    assert public_name(str(tmp_path / "flux-dev")) == "flux-dev"
    assert public_name("s3://models/image/flux-dev/") == "flux-dev"
    assert public_name("s3://flux-dev") == "flux-dev"
    assert public_name("black-forest-labs/FLUX.1-dev") == "black-forest-labs/FLUX.1-dev"
    assert public_name("black-forest-labs/FLUX.1-dev@main") == "black-forest-labs/FLUX.1-dev"
    assert public_name("saggar/emoji") == "saggar/emoji"
    settings = WorkerSettings(jobs=JobSettings(), model="s3://models/flux", model_name="house/flux")
    assert settings.name == "house/flux"


def test_what_is_not_in_s3_is_passed_on(tmp_path: Path) -> None:
    for model in ("saggar/emoji", "org/name@v1", str(tmp_path)):
        assert fetched(model, tmp_path / "cache") == model
    assert not (tmp_path / "cache").exists()


Put = Callable[[str, bytes], None]


@pytest.fixture
def folder(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an S3 folder with a model."""
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{s3_server.bucket}/models/{uuid.uuid4().hex}/paint"
    put = putter(s3_server, url)
    for name, data in FILES.items():
        put(name, data)
    return url


def putter(server: S3Server, url: str) -> Put:
    client, prefix = server.client(), url.removeprefix(f"s3://{server.bucket}/")

    def put(name: str, data: bytes) -> None:
        client.put_object(Bucket=server.bucket, Key=f"{prefix}/{name}", Body=data)

    return put


def start(url: str, cache: Path, **environ: str) -> subprocess.Popen[str]:
    """Another process that fetches the same."""
    command = [sys.executable, "-c", FETCH, url, str(cache)]
    return subprocess.Popen(command, env=os.environ | environ, stdout=subprocess.PIPE, text=True)


def lines(process: subprocess.Popen[str]) -> list[str]:
    return process.communicate(timeout=60)[0].splitlines()


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.e2e
def test_it_is_fetched_once_without_pickles(folder: str, tmp_path: Path, s3_server: S3Server) -> None:
    told: list[str] = []
    first = Path(fetched(folder, tmp_path, told.append))
    assert content(first) == {name: FILES[name] for name in NEEDED}
    assert told[0].startswith(f"fetching {folder}: 4 files, 5.0 MB, to {tmp_path}")
    last = ("fetched 99%", "fetched 100%")  # a small file may come after the weights
    assert any(line.startswith(last) for line in told)
    assert told[-1] == f"fetched {folder}"
    told.clear()
    assert fetched(f"{folder}/", tmp_path, told.append) == str(first)
    assert told == [], "nothing has changed, and something was fetched"
    putter(s3_server, folder)("tokenizer/merges.txt", b"c d")
    second = Path(fetched(folder, tmp_path, told.append))
    assert told[0].startswith(f"fetching {folder}: 1 files")
    assert content(second) == content(first) | {"tokenizer/merges.txt": b"c d"}
    assert content(first)["tokenizer/merges.txt"] == b"a b", "a worker may still load from the older state"


@pytest.mark.e2e
def test_what_is_damaged_here_is_mended(folder: str, tmp_path: Path) -> None:
    first = Path(fetched(folder, tmp_path))
    weights = first / "unet" / "diffusion_pytorch_model.safetensors"
    weights.resolve().write_bytes(b"cut short")
    (first / "unet" / "config.json").unlink()
    assert fetched(folder, tmp_path) == str(first)
    assert content(first) == {name: FILES[name] for name in NEEDED}


@pytest.mark.e2e
def test_of_two_workers_one_fetches(folder: str, tmp_path: Path) -> None:
    said = [lines(process) for process in [start(folder, tmp_path) for _ in range(2)]]
    assert said[0][-1] == said[1][-1]
    assert sum(line.startswith("fetching") for line in said[0] + said[1]) == 1
    place = Path(said[0][-1]).parent
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = start(folder, tmp_path)
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == f"another process fetches to {place}: waiting for it\n"
    assert lines(waiting)[-1] == said[0][-1]


@pytest.mark.e2e
def test_a_killed_worker_is_gone_on_with(folder: str, tmp_path: Path) -> None:
    killed = start(folder, tmp_path, DIE_AT="fetched 4")
    assert not any(line.startswith("fetched 9") for line in lines(killed))
    assert killed.returncode == 9
    (part,) = [path for path in tmp_path.rglob("*.part") if path.stat().st_size > 1 << 20]
    assert part.stat().st_size < len(WEIGHTS)
    told: list[str] = []
    assert content(Path(fetched(folder, tmp_path, told.append))) == {name: FILES[name] for name in NEEDED}
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.e2e
def test_what_is_no_model_is_one_clear_error(folder: str, s3_server: S3Server, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no model_index\.json: it must be the folder of"):
        fetched(folder.rpartition("/")[0], tmp_path)
    with pytest.raises(StorageRefused, match=r"s3://.*: there is no such bucket; make it"):
        fetched("s3://no-such-bucket/model", tmp_path)
    put = putter(s3_server, folder)
    put("unet/näme.json", b"{}")
    with pytest.raises(InvalidKey, match="näme"):
        fetched(folder, tmp_path)
    put("model_index.json", b"{")
    with pytest.raises(LoadError, match=r"paint/model_index\.json: "):
        fetched(folder, tmp_path)


@pytest.mark.e2e
def test_a_model_that_was_uploaded_in_part_is_named_by_its_place(tmp_path: Path) -> None:
    """What was fetched lies in a folder that nobody knows."""
    (tmp_path / "model_index.json").write_text('{"_class_name": "NoopPipeline"}')
    (tmp_path / "saggar.json").write_text('{"params": {"height": {"default": "tall"}}}')
    settings = WorkerSettings.load({"model": "s3://bucket/paint", "executor": "local"}, environ={})
    with pytest.raises(
        LoadError, match=r"^s3://bucket/paint is not whole or damaged; of what was fetched: /"
    ):
        ModelWorker(settings)._make_engine(str(tmp_path))


def test_inspecting_fetches_no_weights(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: S3Server
) -> None:
    """The answer is that of the whole folder, the revision that a worker would serve among it."""
    monkeypatch.setenv("SAGGAR_MODEL_CACHE", str(tmp_path / "cache"))
    save_file({"w": np.zeros((1000, 700), np.float32)}, tmp_path / "w.safetensors")
    put = putter(s3_server, folder)
    put("unet/diffusion_pytorch_model.safetensors", (tmp_path / "w.safetensors").read_bytes())
    reads: list[tuple[str, int, int]] = []
    read = S3Storage.read

    def counted(self: S3Storage, key: str, start: int = 0, etag: str | None = None) -> Iterator[bytes]:
        got = 0
        try:
            for piece in read(self, key, start, etag):
                got += len(piece)
                yield piece
        finally:
            reads.append((key, start, got))

    monkeypatch.setattr(S3Storage, "read", counted)
    shown = CliRunner().invoke(cli, ["models", "inspect", folder, "--json"])
    assert shown.exit_code == 0, shown.output
    told = json.loads(shown.stdout)
    weights = [(start, got) for key, start, got in reads if key.endswith(".safetensors")]
    assert sorted(start for start, _ in weights) == [0, 2_800_080 - (1 << 16)]
    assert sum(got for _, got in weights) < len(WEIGHTS) / 2
    assert not (tmp_path / "cache").exists()
    assert (told["model"], told["folder"]) == (folder, None)
    assert [part["values"] for part in told["components"]] == [700_000]
    whole = inspect_model(fetched(folder, tmp_path / "cache")).to_dict()
    assert told | {"model": None, "folder": None} == whole | {"model": None, "folder": None}
    plain = CliRunner().invoke(cli, ["models", "inspect", folder]).output
    assert "whose weights were not fetched" in plain


def test_no_name_in_a_store_leads_out_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "../../outside.txt": b"a b",  # needed, says the pattern, and its content is there already
        "model_index.json": json.dumps(INDEX | {"more": "*"}).encode(),
        "tokenizer/merges.txt": b"a b",
    }
    store = Bucket("s3://bucket/paint", files)
    monkeypatch.setattr(model_source, "open_storage", lambda _: store)
    with pytest.raises(InvalidKey, match=r"'\.\.' in '\.\./\.\./outside\.txt'"):
        fetched(store.url, tmp_path / "cache")
    assert not (tmp_path / "cache" / "outside.txt").exists()


@pytest.mark.e2e
def test_a_worker_serves_a_model_from_s3_by_its_last_part(
    folder: str, client: JobClient, start_worker: StartWorker, tmp_path: Path, s3_server: S3Server
) -> None:
    cache = tmp_path / "cache"
    worker = start_worker("--model-cache", str(cache), model=folder, environ=s3_server.env).ready("paint")
    assert client.wait(client.submit({"model": "paint", "prompt": "x"}).id, 60).state == "succeeded"
    assert f"fetching {folder}" in worker.log.read_text()
    assert len(list(cache.glob("*/blobs/*"))) == 4
    assert worker.terminate() == 0


@pytest.mark.e2e
def test_a_file_of_prompts_is_made_with_a_model_from_s3(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAGGAR_MODEL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "prompts.txt").write_text("a fox\n")
    arguments = ["run", str(tmp_path / "prompts.txt"), "--model", folder, "--to", str(tmp_path / "out")]
    done = CliRunner().invoke(cli, [*arguments, "--executor", "local", "--no-sheet"])
    assert done.exit_code == 0, done.output
    assert "model paint" in done.output
    assert f"fetching {folder}" in done.output
