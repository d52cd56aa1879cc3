"""Whatever is killed when, and whoever packs beside: every row in one shard, numbers dense, indexes true."""

from __future__ import annotations

import hashlib
import io
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from saggar.storage.base import Storage, StorageSettings, open_storage
from saggar.storage.local import LocalStorage
from saggar.storage.s3 import S3Storage
from saggar.storage.samples import Sample
from saggar.storage.shard_formats import FORMATS
from saggar.storage.shard_index import ShardIndex, ShardKeys, index_numbers, read_indexes, read_total
from saggar.storage.shards import ShardWriter

from tests.support.samples import HookedStorage, samples

ROWS = samples(11)
EACH = 3
KEYS = ShardKeys("set")


class Killed(BaseException):
    """As SIGKILL: nothing of ours runs after it."""


def pack(storage: Storage, rows: list[Sample], kind: str = "webdataset") -> None:
    with ShardWriter(storage, "set", kind, target_count=EACH) as writer:
        for row in rows:
            writer.add(row)
        writer.finish()


def check(storage: Storage, rows: list[Sample], kind: str = "webdataset") -> dict[str, str]:
    """Everything that is promised of a finished set; its objects' hashes."""
    indexes = list(read_indexes(storage, "set"))
    assert [index.number for index in indexes] == list(range(len(indexes)))
    packed = [key for index in indexes for key in index.rows]
    assert sorted(packed) == sorted(row.key for row in rows)
    data = {info.key: storage.get(info.key) for info in storage.list("set/")}
    for index in indexes:
        source = io.BytesIO(data[f"set/data/{index.name}"])
        assert ShardIndex.of(index.number, FORMATS[kind], source) == index
    total = read_total(storage, KEYS)
    assert [line.sha256 for line in total.shards] == [index.sha256 for index in indexes]
    assert data["set/_SUCCESS"].decode().split()[0] == hashlib.sha256(data["set/index.json"]).hexdigest()
    assert len(data) == 2 * len(indexes) + 2, "nothing else lies there"
    return {key: hashlib.sha256(value).hexdigest() for key, value in data.items()}


def half_is_true(storage: Storage, kind: str) -> None:
    """What a reader may meet at any moment: whole shards, and no success without everything."""
    for index in read_indexes(storage, "set"):
        source = io.BytesIO(storage.get(f"set/data/{index.name}"))
        assert ShardIndex.of(index.number, FORMATS[kind], source) == index
    if storage.head("set/_SUCCESS") is not None:
        assert read_total(storage, KEYS).rows == len(ROWS)


@pytest.mark.parametrize("kind", sorted(FORMATS))
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_around_every_call_of_the_store(tmp_path, kind: str, when: str) -> None:
    whole = LocalStorage(tmp_path / "whole")
    pack(whole, ROWS, kind)
    expected = check(whole, ROWS, kind)
    calls = HookedStorage(LocalStorage(tmp_path / "counted"))
    pack(calls, ROWS, kind)
    assert calls.calls > 15
    for point in range(calls.calls):
        storage = LocalStorage(tmp_path / f"kill-{point}")

        def kill(number: int, name: str, point: int = point) -> None:
            if number == point:
                raise Killed

        with pytest.raises(Killed):
            pack(HookedStorage(storage, **{when: kill}), ROWS, kind)
        half_is_true(storage, kind)
        pack(storage, ROWS, kind)
        assert check(storage, ROWS, kind) == expected, f"killed {when} call {point}"


@pytest.mark.parametrize("other", ["same order", "reversed", "half"])
def test_another_packer_at_every_call(tmp_path, other: str) -> None:
    """At each call of the first a second packer does its whole work: one wins each number, no row is there twice."""
    theirs = {"same order": ROWS, "reversed": ROWS[::-1], "half": ROWS[5:]}[other]
    calls = HookedStorage(LocalStorage(tmp_path / "counted"))
    pack(calls, ROWS)
    for point in range(calls.calls):
        storage = LocalStorage(tmp_path / f"meet-{point}")

        def meet(number: int, name: str, point: int = point, storage: Storage = storage) -> None:
            if number == point:
                pack(storage, theirs)

        pack(HookedStorage(storage, before=meet), ROWS)
        check(storage, ROWS)


def race(make: Callable[[], Storage], rounds: int) -> None:
    for number in range(rounds):
        start = Barrier(3)

        def run(packer: int, number: int = number, start: Barrier = start) -> None:
            rows = ROWS.copy()
            random.Random(f"{number}/{packer}").shuffle(rows)
            storage = make()
            with ShardWriter(storage, f"set-{number}/set", target_count=EACH) as writer:
                start.wait(30)
                for row in rows:
                    writer.add(row)
                writer.flush()
            storage.close()

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(run, range(3)))
        storage = make()
        packed = [key for index in read_indexes(storage, f"set-{number}/set") for key in index.rows]
        assert sorted(packed) == [row.key for row in ROWS]
        numbers = index_numbers(storage, ShardKeys(f"set-{number}/set"))
        assert numbers == list(range(len(numbers)))
        storage.close()


def test_packers_that_race(tmp_path) -> None:
    race(lambda: LocalStorage(tmp_path), 20)


@pytest.mark.e2e
def test_packers_that_race_on_s3(s3_store: S3Storage) -> None:
    race(lambda: open_storage(s3_store.url, StorageSettings.from_env()), 3)


PACKER = """
import os, signal, sys
from saggar.storage.base import open_storage
from tests.storage.test_shards_crash import pack, ROWS
from tests.support.samples import HookedStorage
url, when, point = sys.argv[1], sys.argv[2], int(sys.argv[3])
def kill(number, name):
    if number == point:
        os.kill(os.getpid(), signal.SIGKILL)
pack(HookedStorage(open_storage(url), **{when: kill}), ROWS)
"""


@pytest.mark.e2e
def test_packers_that_are_sigkilled(store: Storage) -> None:
    """Each packer goes further than the last one and is killed; the one that is left alone completes the set."""
    killed = 0
    for point in (3, 5, 7, 9, 14):
        when = ("before", "after")[point % 4 // 2]
        command = [sys.executable, "-c", PACKER, store.url, when, str(point)]
        ended = subprocess.run(command, env=os.environ, timeout=120, check=False)
        assert ended.returncode in (-signal.SIGKILL, 0)
        killed += ended.returncode != 0
        half_is_true(store, "webdataset")
    assert killed >= 3
    pack(store, ROWS)
    check(store, ROWS)


MIDWAY = """
import sys
from saggar.storage.base import open_storage
from saggar.storage.samples import Sample
from saggar.storage.shards import ShardWriter
from tests.support.samples import HookedStorage
def say(number, name):
    if name == "put_if_absent":
        print(name, flush=True)
writer = ShardWriter(HookedStorage(open_storage(sys.argv[1]), before=say), "set", target_count=1)
writer.add(Sample("large", {"png": b"x" * (24 << 20)}))
"""


@pytest.mark.e2e
def test_a_kill_while_a_shard_goes_up(store: Storage) -> None:
    """Wherever in its upload it is met: the shard is there whole, or not at all."""
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", MIDWAY, store.url], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            child.kill()
    large = Sample("large", {"png": b"x" * (24 << 20)})
    pack(store, [large])
    check(store, [large])
