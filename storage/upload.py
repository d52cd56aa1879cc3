"""From the spool to the store, for as long as somebody wants it: an outage delays uploads, it fails none."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Event

from saggar.storage.base import ObjectInfo, Storage
from saggar.storage.errors import Conflict
from saggar.storage.retry import Backoff, retrying
from saggar.storage.spool import SpoolEntry, SpoolFile

KeepGoing = Callable[[], bool]
"""Asked after each failure: does anybody still want this (is the lease ours, was the job not cancelled)?"""


def upload_entry(
    storage: Storage,
    entry: SpoolEntry,
    *,
    keep_going: KeepGoing,
    stop: Event | None = None,
    backoff: Backoff | None = None,
) -> tuple[ObjectInfo, ...]:
    """Put every file of an entry, in order, and again and again while the store is away. The entry stays.

    Raises the last StorageUnavailable when told to stop, StorageRefused at once, Conflict when the disk has
    lost bytes.
    """
    wait = backoff or Backoff()
    return tuple(
        retrying(partial(_put, storage, entry, file), lambda _: keep_going(), backoff=wait, stop=stop)
        for file in entry.files
    )


class Uploader:
    """A few threads that upload entries side by side; keep them fewer than the store's connections."""

    def __init__(self, storage: Storage, threads: int = 4, backoff: Backoff | None = None) -> None:
        self._storage = storage
        self._backoff = backoff
        self._stop = Event()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="upload")

    def submit(self, entry: SpoolEntry, keep_going: KeepGoing) -> Future[tuple[ObjectInfo, ...]]:
        """Start uploading; the future ends as `upload_entry` does."""
        return self._pool.submit(
            upload_entry,
            self._storage,
            entry,
            keep_going=keep_going,
            stop=self._stop,
            backoff=self._backoff,
        )

    def close(self) -> None:
        """End waits between tries at once, let running calls finish; the rest stays in the spool."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)


def _put(storage: Storage, entry: SpoolEntry, file: SpoolFile) -> ObjectInfo:
    found = storage.put(file.key, entry.path(file), content_type=file.content_type)
    if found.sha256 != file.sha256:
        raise Conflict(f"{entry.path(file)} no longer holds the bytes that were written")
    return found
