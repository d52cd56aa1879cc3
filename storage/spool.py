"""Finished outputs on the local disk until the store has them: the engine goes on while the store is away, and
memory does not fill.

    <base>/slot-<n>/.lock                          held by the one process that owns this slot
    <base>/slot-<n>/<job>.a<attempt>/0, 1, …       an entry: one attempt's objects

A spool does not outlive its process. An attempt ends with its worker, its job's message comes again, and with
it a new attempt: what a dead process left is deleted by the next one that claims a spool beside it. Bytes are
flushed, so that a full disk is met here and not later. Room is counted in bytes; an entry larger than the
whole limit is let in when the spool is empty, so that it can pass at all.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import Self

from saggar.storage.errors import Conflict, SpoolFull, StorageConfigError
from saggar.storage.files import make_folders, opened_folder, sha256_of, write_new
from saggar.storage.keys import attempt_prefix, check_key

_LOCK = ".lock"
_DOOMED = ".doomed-"
_SLOT = re.compile(r"slot-\d+")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class SpoolItem:
    """An object to be: its key in the store and its bytes."""

    key: str
    data: bytes
    content_type: str


@dataclass(frozen=True, slots=True)
class SpoolFile:
    """An object that waits in the spool: `name` within the entry's folder, `size` in bytes."""

    name: str
    key: str
    sha256: str
    size: int
    content_type: str


@dataclass(frozen=True, slots=True)
class SpoolEntry:
    """One attempt's objects."""

    folder: Path
    files: tuple[SpoolFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def path(self, file: SpoolFile) -> Path:
        return self.folder / file.name


class Spool:
    """The spool of one process; its threads share it."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Take the folder (made when missing) and empty it of what a dead process has left.

        Raises StorageConfigError when another process holds it.
        """
        make_folders(folder)
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._lock = _take_lock(folder)
        self._changed = Condition()  # over a re-entrant lock
        self._used = 0
        self._refused = False  # by the disk, whatever it said of its room: a quota's end cannot be asked for
        _empty(folder)

    @classmethod
    def claim(cls, base: Path, limit_bytes: int) -> Self:
        """The first free spool under `base`; the others that nobody holds are emptied."""
        make_folders(base)
        number = 0
        while True:
            try:
                spool = cls(base / f"slot-{number}", limit_bytes)
            except StorageConfigError:
                number += 1
                continue
            for slot in base.iterdir():
                if _SLOT.fullmatch(slot.name) and slot != spool.folder:
                    _empty_if_free(slot)
            return spool

    @property
    def used_bytes(self) -> int:
        return self._used

    def room(self) -> int:
        """Bytes that fit now: into the limit, and onto the disk."""
        with self._changed:
            return max(0, min(self.limit_bytes - self._used, _free_bytes(self.folder)))

    def wait_for_room(self, needed: int, timeout_s: float) -> bool:
        """Block until `needed` bytes fit; False when the time was up first.

        When the disk has refused the last write, until an entry was removed: what it says of its room is then
        worth nothing, and only the next write can tell.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._refused and self._fits(needed), timeout_s)

    def write(self, job_id: str, attempt: int, items: Sequence[SpoolItem]) -> SpoolEntry:
        """Put an attempt's objects down here.

        Raises SpoolFull (the disk's end counts too), and Conflict when this attempt has an entry.
        """
        name = attempt_prefix("", job_id, attempt).replace("/", ".")
        for item in items:
            check_key(item.key)
        needed = sum(len(item.data) for item in items)
        self._take_room(needed)
        try:
            entry = _write(self.folder / name, items)
        except BaseException as error:
            full = isinstance(error, OSError) and error.errno in _DISK_FULL
            self._give_room(needed, refused=full)
            if full:
                raise SpoolFull(needed, 0) from error
            raise
        self._refused = False
        return entry

    def remove(self, entry: SpoolEntry) -> None:
        """Forget an entry: the store has it, or nobody wants it any more. Twice is no error."""
        doomed = self.folder / f"{_DOOMED}{uuid.uuid4().hex}"
        try:
            entry.folder.rename(doomed)  # of two threads, one gets it
        except FileNotFoundError:
            return
        shutil.rmtree(doomed)
        self._give_room(entry.size)

    def close(self) -> None:
        """Let another process take the folder."""
        os.close(self._lock)

    def _fits(self, needed: int) -> bool:
        within = self._used == 0 or self._used + needed <= self.limit_bytes
        return within and needed <= _free_bytes(self.folder)

    def _take_room(self, needed: int) -> None:
        with self._changed:
            if not self._fits(needed):
                raise SpoolFull(needed, self.room())
            self._used += needed

    def _give_room(self, size: int, *, refused: bool = False) -> None:
        with self._changed:
            self._used -= size
            self._refused = refused
            self._changed.notify_all()


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _take_lock(folder: Path) -> int:
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise StorageConfigError(f"another process holds the spool {folder}") from error
    return lock


def _empty(folder: Path) -> None:
    for left in folder.iterdir():
        if left.name != _LOCK:
            shutil.rmtree(left)


def _empty_if_free(folder: Path) -> None:
    try:
        lock = _take_lock(folder)
    except StorageConfigError:
        return  # its owner lives
    try:
        _empty(folder)
    finally:
        os.close(lock)


def _write(place: Path, items: Sequence[SpoolItem]) -> SpoolEntry:
    try:
        place.mkdir()
    except FileExistsError as error:
        raise Conflict(f"{place.name} is in the spool already") from error
    try:
        with opened_folder(place) as folder:
            for number, item in enumerate(items):
                write_new(str(number), item.data, dir_fd=folder)
    except BaseException:
        shutil.rmtree(place)
        raise
    return SpoolEntry(place, _describe(items))


def _describe(items: Sequence[SpoolItem]) -> tuple[SpoolFile, ...]:
    return tuple(
        SpoolFile(
            name=str(number),
            key=item.key,
            sha256=sha256_of(item.data),
            size=len(item.data),
            content_type=item.content_type,
        )
        for number, item in enumerate(items)
    )
