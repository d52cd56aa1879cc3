"""The spool shows nothing unfinished, knows its room, and outlives no process."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from saggar.storage.errors import Conflict, InvalidKey, SpoolFull, StorageConfigError
from saggar.storage.spool import Spool, SpoolEntry, SpoolItem

WRITER = """
import sys
from pathlib import Path
from saggar.storage.spool import Spool, SpoolItem
spool = Spool.claim(Path(sys.argv[1]), 1 << 30)
spool.write("job", 1, [SpoolItem("out/job/a1/0", b"x" * 5000, "image/png")])
print(spool.folder, flush=True)
sys.stdin.read()
"""


def items(*contents: bytes) -> list[SpoolItem]:
    return [SpoolItem(f"out/job/a1/{i}.png", data, "image/png") for i, data in enumerate(contents)]


def contents(entry: SpoolEntry) -> list[bytes]:
    return [entry.path(file).read_bytes() for file in entry.files]


def entries(spool: Spool) -> list[str]:
    return sorted(path.name for path in spool.folder.iterdir() if path.name != ".lock")


def test_an_entry_from_its_writing_to_its_removal(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1000)
    entry = spool.write("job", 3, items(b"one", b"four"))
    assert (contents(entry), entry.size, spool.used_bytes) == ([b"one", b"four"], 7, 7)
    assert [file.key for file in entry.files] == ["out/job/a1/0.png", "out/job/a1/1.png"]
    assert entries(spool) == ["job.a3"]
    spool.remove(entry)
    spool.remove(entry)
    assert (entries(spool), spool.used_bytes, spool.room()) == ([], 0, 1000)
    spool.close()


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_write_that_the_disk_refuses_leaves_nothing_and_takes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    spool = Spool(tmp_path, 100)
    with refusing(monkeypatch, number), pytest.raises(SpoolFull):
        spool.write("job", 1, items(b"12345"))
    assert (entries(spool), spool.used_bytes) == ([], 0)
    spool.write("job", 1, items(b"12345"))
    spool.close()


def test_after_a_refusal_of_the_disk_only_a_removal_or_a_write_means_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota's end: the disk still says that there is room."""
    spool = Spool(tmp_path, 100)
    first = spool.write("job", 1, items(b"12345"))
    second = spool.write("job", 2, items(b"12345"))
    for entry in (first, second):
        with refusing(monkeypatch, errno.EDQUOT), pytest.raises(SpoolFull):
            spool.write("job", 3, items(b"1"))
        assert spool.room() > 1
        assert spool.wait_for_room(1, timeout_s=0.01) is False
        threading.Timer(0.05, spool.remove, [entry]).start()
        assert spool.wait_for_room(1, timeout_s=10) is True
    with refusing(monkeypatch, errno.EDQUOT), pytest.raises(SpoolFull):
        spool.write("job", 3, items(b"1"))
    spool.write("job", 3, items(b"1"))
    assert spool.wait_for_room(1, timeout_s=0.01) is True
    spool.close()


@contextmanager
def refusing(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    """Every flush fails with this errno."""

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        yield


def test_an_attempt_has_one_entry(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 100)
    first = spool.write("job", 1, items(b"first"))
    with pytest.raises(Conflict):
        spool.write("job", 1, items(b"second"))
    assert contents(first) == [b"first"]
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


def test_claim_takes_a_free_place_and_deletes_what_the_dead_left(tmp_path: Path) -> None:
    first, second, third = (Spool.claim(tmp_path, 100) for _ in range(3))
    assert len({first.folder, second.folder, third.folder}) == 3
    mine = first.write("mine", 1, items(b"1"))
    second.write("left", 1, items(b"22"))
    third.write("left", 1, items(b"333"))
    second.close()
    third.close()
    heir = Spool.claim(tmp_path, 100)
    assert heir.folder == second.folder
    assert (entries(heir), entries(third), heir.used_bytes) == ([], [], 0)
    assert contents(mine) == [b"1"]
    heir.close()
    first.close()


@pytest.mark.e2e
def test_a_killed_process_holds_no_spool_and_leaves_nothing_for_long(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        folder = Path(writer.stdout.readline().strip())
        other = Spool.claim(tmp_path, 100)
        assert other.folder != folder
        assert (folder / "job.a1" / "0").read_bytes() == b"x" * 5000
        writer.send_signal(signal.SIGKILL)
    other.close()
    spool = Spool.claim(tmp_path, 100)
    assert spool.folder == folder
    assert entries(spool) == []
    spool.close()
