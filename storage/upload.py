"""From the spool to the store, for as long as somebody wants it: an outage delays uploads, it fails none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Event

from saggar.storage.base import ObjectInfo, Storage
from saggar.storage.errors import Conflict
from saggar.storage.patience import Patience
from saggar.storage.spool import SpoolEntry, SpoolFile

KeepGoing = Callable[[], bool]
"""Asked after each failure: does anybody still want this (is the lease ours, was the job not cancelled)?"""


def upload_entry(
    storage: Storage,
    entry: SpoolEntry,
    *,
    keep_going: KeepGoing,
    patience: Patience,
    stop: Event | None = None,
) -> tuple[ObjectInfo, ...]:
    """Put every file of an entry, in order, and again and again while the store is away. The entry stays.

    `stop` ends a wait between two tries at once.
    Raises the last StorageUnavailable when told to stop, StorageRefused for an object that is refused by itself,
    Conflict when the disk has lost bytes.
    """
    return tuple(patience.call(partial(_put, storage, entry, file), keep_going, stop) for file in entry.files)


def _put(storage: Storage, entry: SpoolEntry, file: SpoolFile) -> ObjectInfo:
    found = storage.put(file.key, entry.path(file), content_type=file.content_type)
    if found.sha256 != file.sha256:
        raise Conflict(f"{entry.path(file)} no longer holds the bytes that were written")
    return found
