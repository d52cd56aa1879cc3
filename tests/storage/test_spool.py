"""The spool loses nothing that it has acknowledged, shows nothing unfinished, and knows its room."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from saggar.storage.errors import Conflict, InvalidKey, SpoolFull, StorageConfigError
from saggar.storage.spool import Spool, SpoolEntry, SpoolItem

WRITER = """
import sys
from pathlib import Path
from saggar.storage.spool import Spool, SpoolItem
spool = Spool.claim(Path(sys.argv[1]), 1 << 30)
for number in range(1_000_000):
    items = [SpoolItem(f"out/j{number}/a1/{i}", b"%d" % number * 5000, "image/png") for i in range(3)]
    spool.write(f"j{number}", 1, items, note=str(number))
    print(number, flush=True)
"""


def items(*contents: bytes) -> list[SpoolItem]:
    return [SpoolItem(f"out/job/a1/{i}.png", data, "image/png") for i, data in enumerate(contents)]


def contents(entry: SpoolEntry) -> list[bytes]:
    return [entry.path(file).read_bytes() for file in entry.files]


def test_an_entry_is_there_again_after_reopening(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1000)
    entry = spool.write("job", 3, items(b"one", b"four"), note='{"any": "text"}')
    spool.close()
    again = Spool(tmp_path, 1000)
    assert again.entries() == [entry]
    assert (entry.job_id, entry.attempt, entry.note, entry.size) == ("job", 3, '{"any": "text"}', 7)
    assert contents(entry) == [b"one", b"four"]
    assert again.used_bytes == 7
    again.remove(entry)
    again.remove(entry)
    assert (again.entries(), again.used_bytes, again.room()) == ([], 0, 1000)
    again.close()


def test_room(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 10)
    first = spool.write("job", 1, items(b"12345678"))
    assert spool.room() == 2
    with pytest.raises(SpoolFull) as caught:
        spool.write("job", 2, items(b"123"))
    assert (caught.value.needed, caught.value.room) == (3, 2)
    assert spool.wait_for_room(3, timeout_s=0.01) is False
    spool.write("job", 3, items(b"12"))
    threading.Timer(0.05, spool.remove, [first]).start()
    assert spool.wait_for_room(3, timeout_s=10) is True
    spool.close()


def test_an_entry_larger_than_the_limit_passes_alone(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 10)
    large = spool.write("job", 1, items(b"x" * 50))
    assert spool.room() == 0
    with pytest.raises(SpoolFull):
        spool.write("job", 2, items(b"x"))
    spool.remove(large)
    assert spool.room() == 10
    spool.close()


def test_a_failed_write_leaves_nothing_and_takes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path, 100)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(SpoolFull):
            spool.write("job", 1, items(b"12345"))
    assert (spool.entries(), spool.used_bytes) == ([], 0)
    assert os.listdir(tmp_path) == [".lock"]
    spool.close()


def test_an_attempt_has_one_entry(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 100)
    spool.write("job", 1, items(b"first"))
    with pytest.raises(Conflict):
        spool.write("job", 1, items(b"second"))
    assert [contents(entry) for entry in spool.entries()] == [[b"first"]]
    assert spool.used_bytes == 5
    spool.close()


def test_the_disk_s_end_counts_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path, 1000)
    monkeypatch.setattr("saggar.storage.spool._free_bytes", lambda folder: 4)
    assert spool.room() == 4
    with pytest.raises(SpoolFull):
        spool.write("job", 1, items(b"12345"))
    spool.write("job", 1, items(b"1234"))
    spool.close()


@pytest.mark.parametrize("job_id", ["", "..", "a/b", ".part-x", "a\0"])
def test_job_ids_are_checked(tmp_path: Path, job_id: str) -> None:
    spool = Spool(tmp_path, 100)
    with pytest.raises(InvalidKey):
        spool.write(job_id, 1, items(b"x"))
    spool.close()


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 100)
    with pytest.raises(StorageConfigError, match="another process"):
        Spool(tmp_path, 100)
    spool.close()
    Spool(tmp_path, 100).close()


def test_claim_takes_a_free_place_and_what_the_dead_left(tmp_path: Path) -> None:
    first, second = Spool.claim(tmp_path, 100), Spool.claim(tmp_path, 100)
    assert first.folder != second.folder
    first.write("mine", 1, items(b"1"))
    second.write("orphan", 1, items(b"22"))
    second.close()
    third = Spool.claim(tmp_path, 100)
    assert [entry.job_id for entry in third.entries()] == ["orphan"]
    third.close()
    first.close()
    heir = Spool.claim(tmp_path, 100)
    assert sorted(entry.job_id for entry in heir.entries()) == ["mine", "orphan"]
    assert heir.used_bytes == 3
    heir.close()


@pytest.mark.e2e
def test_a_killed_writer_loses_nothing_it_has_acknowledged(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        acknowledged = [int(next(writer.stdout)) for _ in range(30)]
        writer.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in writer.stdout.read().split("\n")[:-1]]
    spool = Spool.claim(tmp_path, 1 << 30)
    found = {int(entry.note): entry for entry in spool.entries()}
    assert set(acknowledged) <= set(found)
    assert len(found) <= len(acknowledged) + 1
    for number, entry in found.items():
        assert contents(entry) == [b"%d" % number * 5000] * 3
    assert not list(spool.folder.glob(".part-*"))
    spool.close()
