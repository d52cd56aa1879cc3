"""fsync of many descriptors side by side: the file system makes one or two flushes of them, where one after the other
each would be one.

Plain queues, no futures: what hands a flush over must cost less than a flush of a quick disk.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue

Errors = list[OSError | None]


@dataclass(frozen=True, slots=True)
class _Share:
    """The places that one thread flushes, and where it says so."""

    descriptors: Sequence[int]
    places: range
    errors: Errors
    done: SimpleQueue[None]

    def flush(self) -> None:
        for place in self.places:
            try:
                os.fsync(self.descriptors[place])
            except OSError as error:
                self.errors[place] = error


class Flushers:
    """`count` threads, the caller's among them; started when there is something to share. Thread-safe. Close it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._shares: SimpleQueue[_Share | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def flush(self, descriptors: Sequence[int]) -> Errors:
        """For each None, or why it failed."""
        parts = min(self._count, len(descriptors))
        errors: Errors = [None] * len(descriptors)
        done: SimpleQueue[None] = SimpleQueue()
        shares = [
            _Share(descriptors, range(first, len(descriptors), parts), errors, done) for first in range(parts)
        ]
        if parts > 1:
            self._start()
        for share in shares[1:]:
            self._shares.put(share)
        for share in shares[:1]:
            share.flush()
        for _ in shares[1:]:
            done.get()
        return errors

    def close(self) -> None:
        with self._lock:
            for _ in self._threads:
                self._shares.put(None)
            for thread in self._threads:
                thread.join()
            self._threads = []

    def _start(self) -> None:
        if self._threads:
            return
        with self._lock:
            for number in range(0 if self._threads else self._count - 1):
                thread = threading.Thread(target=self._live, name=f"saggar-flush-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)

    def _live(self) -> None:
        while (share := self._shares.get()) is not None:
            try:
                share.flush()
            finally:
                share.done.put(None)
