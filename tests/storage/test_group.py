"""Many objects of a folder at once: the promises of one, for each of them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from saggar.storage.errors import InvalidKey, StorageUnavailable
from saggar.storage.local import LocalStorage
from saggar.storage.spool import SpoolItem


def items(*keys: str) -> list[SpoolItem]:
    return [SpoolItem(key, f"bytes of {key}".encode(), "text/plain") for key in keys]


KEYS = [f"runs/x/job{job}/a1/{index}-x.png" for job in range(4) for index in range(2)]


class Diary:
    """What was done to the disk, in order: ("flush", inode), ("name", inode, inode of its folder), and so on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[tuple[Any, ...]] = []
        fsync, replace, link, mkdir = os.fsync, os.replace, os.link, os.mkdir

        def flushed(descriptor: int) -> None:
            fsync(descriptor)
            self.lines.append(("flush", os.fstat(descriptor).st_ino))

        def named(do: Callable[..., None]) -> Callable[..., None]:
            def wrapped(source: str, name: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
                do(source, name, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
                inode = os.stat(name, dir_fd=dst_dir_fd).st_ino
                self.lines.append(("name", inode, os.fstat(dst_dir_fd).st_ino))

            return wrapped

        def made(name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            mkdir(name, mode, dir_fd=dir_fd)
            assert dir_fd is not None
            self.lines.append(("name", os.stat(name, dir_fd=dir_fd).st_ino, os.fstat(dir_fd).st_ino))

        monkeypatch.setattr(os, "fsync", flushed)
        monkeypatch.setattr(os, "replace", named(replace))
        monkeypatch.setattr(os, "link", named(link))
        monkeypatch.setattr(os, "mkdir", made)

    def flushes(self, inode: int) -> int:
        return self.lines.count(("flush", inode))


@pytest.mark.parametrize("absent", [False, True])
def test_bytes_before_names_and_names_before_the_answer(
    local_store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: bool
) -> None:
    diary = Diary(monkeypatch)
    put = local_store.put_group_if_absent if absent else local_store.put_group
    assert set(put(items(*KEYS))) == {True if absent else None}
    names = [index for index, line in enumerate(diary.lines) if line[0] == "name"]
    for index in names:
        _, inode, folder = diary.lines[index]
        is_file = any(inode == path.stat().st_ino for path in tmp_path.rglob("*.png"))
        assert not is_file or ("flush", inode) in diary.lines[:index]
        assert ("flush", folder) in diary.lines[index:]
    for path in (tmp_path / "objects").rglob("*"):
        if stat.S_ISDIR(path.stat().st_mode) and path.name != ".tmp":
            assert diary.flushes(path.stat().st_ino) == 1
    assert all(local_store.get(key) == f"bytes of {key}".encode() for key in KEYS)
    assert list((tmp_path / "objects" / ".tmp").iterdir()) == []


def test_a_folder_that_somebody_else_made_is_flushed_too(
    local_store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "objects" / "runs").mkdir()
    diary = Diary(monkeypatch)
    local_store.put_group(items("runs/one"))
    root = (tmp_path / "objects").stat().st_ino
    assert diary.flushes(root) == 1
    local_store.put_group(items("runs/two"))
    assert diary.flushes(root) == 1


def test_what_is_there_is_left_alone(local_store: LocalStorage) -> None:
    local_store.put("job1/result.json", b"first", content_type="application/json")
    answers = local_store.put_group_if_absent(
        items("job0/result.json", "job1/result.json", "job2/result.json")
    )
    assert list(answers) == [True, False, True]
    assert local_store.get("job1/result.json") == b"first"
    assert list(local_store.put_group(items("job1/result.json"))) == [None]
    assert local_store.get("job1/result.json") == b"bytes of job1/result.json"


def test_one_that_cannot_be_there_is_not_the_fault_of_the_others(
    local_store: LocalStorage, tmp_path: Path
) -> None:
    (tmp_path / "objects" / "job1").write_text("no folder")
    (tmp_path / "outside").mkdir()
    (tmp_path / "objects" / "job2").symlink_to(tmp_path / "outside")
    answers = local_store.put_group(items("job0/x", "job1/x", "job2/x", "job3/x"))
    assert [type(answer) for answer in answers] == [type(None), InvalidKey, InvalidKey, type(None)]
    assert sorted(info.key for info in local_store.list("")) == ["job0/x", "job1", "job3/x"]
    assert list((tmp_path / "outside").iterdir()) == []
    assert list((tmp_path / "objects" / ".tmp").iterdir()) == []


def test_a_key_that_is_none_is_refused_before_anything_is_written(local_store: LocalStorage) -> None:
    with pytest.raises(InvalidKey):
        local_store.put_group(items("job0/x", "../x"))
    assert list(local_store.list("")) == []


def test_a_file_that_cannot_be_flushed_gets_no_name(
    local_store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, calls = os.fsync, []

    def fail_once(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "full")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_once)
    answers = local_store.put_group(items("job0/x", "job1/x", "job2/x"))
    assert [type(answer) for answer in answers] == [type(None), StorageUnavailable, type(None)]
    assert local_store.head("job1/x") is None
    assert list((tmp_path / "objects" / ".tmp").iterdir()) == []


def test_a_folder_that_cannot_be_flushed_acknowledges_nothing_in_it(
    local_store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_store.put_group(items("job0/x", "job1/x"))
    fsync, bad = os.fsync, (tmp_path / "objects" / "job1").stat().st_ino

    def fail(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == bad:
            raise OSError(errno.EIO, "broken")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    answers = local_store.put_group(items("job0/y", "job1/y", "job1/deeper/y"))
    assert [type(answer) for answer in answers] == [type(None), StorageUnavailable, StorageUnavailable]
