"""Finished outputs on the local disk until the store has them: the engine goes on, and a crash loses nothing.

    <folder>/.lock                  held by the one process that owns this spool
    <folder>/<job>.a<attempt>/0, 1, …, entry.json

An entry is written under a temporary name, flushed, and renamed: one that can be seen is whole. Room is
counted in bytes; an entry larger than the whole limit is let in when the spool is empty, so that it can
pass at all.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError
from saggar.storage.errors import Conflict, SpoolFull, StorageConfigError
from saggar.storage.files import flush_folder, make_folders, opened_folder, sha256_of, write_new
from saggar.storage.keys import attempt_prefix, check_key

_ENTRY = "entry.json"
_LOCK = ".lock"
_TEMPORARY = ".part-"
_SLOT = re.compile(r"slot-\d+")


@dataclass(frozen=True, slots=True)
class SpoolItem:
    """An object to be: its key in the store and its bytes."""

    key: str
    data: bytes
    content_type: str


class SpoolFile(BaseModel):
    """An object that waits in the spool: `name` within the entry's folder, `size` in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    key: str
    sha256: str
    size: int
    content_type: str


class _Record(BaseModel):
    """What entry.json says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job_id: str
    attempt: int
    note: str
    files: tuple[SpoolFile, ...]


@dataclass(frozen=True, slots=True)
class SpoolEntry:
    """One attempt's outputs; `note` is the writer's own text (its manifest, say), given back as it was."""

    folder: Path
    job_id: str
    attempt: int
    note: str
    files: tuple[SpoolFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def path(self, file: SpoolFile) -> Path:
        return self.folder / file.name


class Spool:
    """The spool of one process; its threads share it."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Take the folder (made when missing) and count what a crash has left in it.

        Raises StorageConfigError when another process holds it.
        """
        make_folders(folder)
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._lock = _take_lock(folder)
        self._changed = Condition()  # over a re-entrant lock
        _remove_unfinished(folder)
        self._used = sum(entry.size for entry in self.entries())

    @classmethod
    def claim(cls, base: Path, limit_bytes: int) -> Self:
        """The first free spool under `base`, and with it whatever dead processes have left in the others."""
        make_folders(base)
        number = 0
        while True:
            try:
                spool = cls(base / f"slot-{number}", limit_bytes)
            except StorageConfigError:
                number += 1
                continue
            spool._adopt_from(slot for slot in base.iterdir() if _SLOT.fullmatch(slot.name))
            return spool

    @property
    def used_bytes(self) -> int:
        return self._used

    def room(self) -> int:
        """Bytes that fit now: into the limit, and onto the disk."""
        with self._changed:
            return max(0, min(self.limit_bytes - self._used, _free_bytes(self.folder)))

    def wait_for_room(self, needed: int, timeout_s: float) -> bool:
        """Block until `needed` bytes fit; False when the time was up first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._fits(needed), timeout_s)

    def write(self, job_id: str, attempt: int, items: Sequence[SpoolItem], note: str = "") -> SpoolEntry:
        """Make an attempt's outputs durable here.

        Raises SpoolFull (the disk's end counts too), and Conflict when this attempt has an entry.
        """
        name = attempt_prefix("", job_id, attempt).replace("/", ".")
        for item in items:
            check_key(item.key)
        needed = sum(len(item.data) for item in items)
        self._take_room(needed)
        try:
            record = _Record(job_id=job_id, attempt=attempt, note=note, files=_describe(items))
            return self._write(name, items, record)
        except BaseException as error:
            self._give_room(needed)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise SpoolFull(needed, 0) from error
            raise

    def entries(self) -> list[SpoolEntry]:
        """What waits, oldest first. Raises Conflict when an entry cannot be read."""
        return [_read_entry(folder) for folder in _entry_folders(self.folder)]

    def remove(self, entry: SpoolEntry) -> None:
        """Forget an entry: the store has it, or nobody wants it any more. Twice is no error."""
        doomed = self.folder / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            entry.folder.rename(doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed)
        self._give_room(entry.size)

    def close(self) -> None:
        """Let another process take the folder; entries stay."""
        os.close(self._lock)

    def _write(self, name: str, items: Sequence[SpoolItem], record: _Record) -> SpoolEntry:
        final, part = self.folder / name, self.folder / f"{_TEMPORARY}{uuid.uuid4().hex}"
        part.mkdir()
        try:
            with opened_folder(part) as folder:
                for file, item in zip(record.files, items, strict=True):
                    write_new(file.name, item.data, dir_fd=folder)
                write_new(_ENTRY, record.model_dump_json().encode(), dir_fd=folder)
                os.fsync(folder)
            _rename_new(part, final)
        except BaseException:
            shutil.rmtree(part)
            raise
        flush_folder(self.folder)
        return SpoolEntry(final, record.job_id, record.attempt, record.note, record.files)

    def _fits(self, needed: int) -> bool:
        within = self._used == 0 or self._used + needed <= self.limit_bytes
        return within and needed <= _free_bytes(self.folder)

    def _take_room(self, needed: int) -> None:
        with self._changed:
            if not self._fits(needed):
                raise SpoolFull(needed, self.room())
            self._used += needed

    def _give_room(self, size: int) -> None:
        with self._changed:
            self._used -= size
            self._changed.notify_all()

    def _adopt_from(self, slots: Iterable[Path]) -> None:
        for slot in sorted(slots):
            if slot == self.folder:
                continue
            try:
                lock = _take_lock(slot)
            except StorageConfigError:
                continue  # its owner lives
            for folder in _entry_folders(slot):
                if not (self.folder / folder.name).exists():
                    folder.rename(self.folder / folder.name)
                    self._used += _read_entry(self.folder / folder.name).size
            os.close(lock)
        flush_folder(self.folder)


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


def _remove_unfinished(folder: Path) -> None:
    for left in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(left)


def _entry_folders(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))


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


def _read_entry(folder: Path) -> SpoolEntry:
    try:
        record = _Record.model_validate_json((folder / _ENTRY).read_bytes())
    except (FileNotFoundError, ValidationError) as error:
        raise Conflict(f"{folder} is no spool entry: {error}") from error
    return SpoolEntry(folder, record.job_id, record.attempt, record.note, record.files)


def _rename_new(part: Path, final: Path) -> None:
    """A folder's rename fails on a folder that holds something: an entry is never replaced."""
    try:
        part.rename(final)
    except OSError as error:
        if final.exists():
            raise Conflict(f"{final.name} is in the spool already") from error
        raise
