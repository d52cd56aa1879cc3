"""An object to a local file: resumed where an earlier try ended, checked by digest, there whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from saggar.storage.base import ObjectInfo, Storage
from saggar.storage.errors import Conflict, NotFound, StorageRefused, StorageUnavailable
from saggar.storage.files import flush_folder
from saggar.storage.retry import Backoff, retrying

ATTEMPTS = 5
"""Broken connections in a row, none of which brought a byte."""


def download(storage: Storage, info: ObjectInfo, target: Path, on_bytes: Callable[[int], None]) -> None:
    """Write the object, as `head` or `list` described it, to `target`, whose folder exists.

    `on_bytes` is told how many bytes each piece brought, those of earlier tries at the start; what it raises ends
    the download, which the next call goes on with. One caller at a time for a target. NotFound; Conflict: the object
    was replaced; StorageUnavailable; StorageRefused: its bytes are not those that the store names, twice.
    """
    known = storage.head(info.key)
    if known is None:
        raise NotFound(info.key)
    if known.etag != info.etag:
        raise Conflict(f"{info.key}: it was replaced meanwhile")
    part = target.with_name(f"{target.name}.part")
    for _ in range(2):  # a part that an earlier process left may be what is wrong
        _fetch(storage, info, part, on_bytes)
        if _as_told(part, known):
            break
        on_bytes(-part.stat().st_size)
        part.unlink()
    else:
        raise StorageRefused(
            f"{info.key}: its bytes have another digest than the store tells: upload it again"
        )
    os.replace(part, target)
    flush_folder(target.parent)


def _fetch(storage: Storage, info: ObjectInfo, part: Path, on_bytes: Callable[[int], None]) -> None:
    """Append what is missing, flushed to the disk."""
    with part.open("ab") as file:
        if file.tell() > info.size:
            file.seek(0)
            file.truncate()
        on_bytes(file.tell())
        before = file.tell()

        def keep_going(failures: int) -> bool:
            nonlocal before
            moved, before = file.tell() > before, file.tell()
            return moved or failures < ATTEMPTS

        def append() -> None:
            if file.tell() == info.size:
                return
            for piece in storage.read(info.key, file.tell(), info.etag):
                file.write(piece)
                on_bytes(len(piece))
            if file.tell() != info.size:
                raise StorageUnavailable(f"{info.key}: it ended after {file.tell()} of {info.size} bytes")

        retrying(append, keep_going, backoff=Backoff())
        file.flush()
        os.fsync(file.fileno())


def _as_told(path: Path, known: ObjectInfo) -> bool:
    """Whether the file has the digest that the store has for the object, if it has one."""
    digest = known.sha256 or known.md5
    if path.stat().st_size != known.size:
        return False
    if digest is None:
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256" if known.sha256 else "md5").hexdigest() == digest
