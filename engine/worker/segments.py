"""Large shared-memory segments that are used again: their pages are there already, so that writing one costs less
than a copy, where a new one costs many times that.

The sender owns a segment and lends it with a message; the receiver keeps its mapping and says when the last array in it
is gone. Segments are anonymous memory files: nothing of them is left however either side ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

KEPT_BYTES = 256 * 1024 * 1024
"""Segments that nobody uses are kept up to so many bytes together."""
_ROUND = 1024 * 1024
_WASTE = 4
"""A segment is not used for messages so many times smaller."""

Places = Sequence[tuple[int, np.ndarray]]
"""Arrays with their offsets."""


def memory_file() -> int:
    """The descriptor of a file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("saggar")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write_arrays(fd: int, places: Places) -> None:
    """Through the descriptor: for new pages, and for those that are not mapped."""
    for offset, value in places:
        data, done = np.ascontiguousarray(value).data.cast("B"), 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], offset + done)


@dataclass
class Segment:
    """A segment that this side owns; `fd` until it has been sent."""

    id: int
    memory: mmap.mmap
    fd: int | None

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.memory)

    def write(self, places: Places) -> None:
        """Put the arrays in."""
        if self.fd is not None:
            write_arrays(self.fd, places)
            return
        for offset, value in places:
            np.ndarray(value.shape, value.dtype, self.memory, offset)[...] = value

    def sent(self) -> None:
        """The other side has the descriptor."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class Pool:
    """The sender's segments. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._lent: dict[int, Segment] = {}
        self._free: dict[int, Segment] = {}
        self._forgotten: deque[int] = deque()

    def lend(self, size: int) -> Segment:
        """A segment of at least this size."""
        with self._lock:
            fitting = [one for one in self._free.values() if size <= one.size <= _WASTE * size]
            segment = min(fitting, key=lambda one: one.size) if fitting else self._new(size)
            self._free.pop(segment.id, None)
            self._lent[segment.id] = segment
            return segment

    def take_back(self, ids: Iterable[int]) -> None:
        """The other side has no array in these any more."""
        with self._lock:
            for ident in ids:
                segment = self._lent.pop(ident, None)
                if segment is not None:  # None: closed in the meantime
                    self._free[ident] = segment
            while sum(one.size for one in self._free.values()) > KEPT_BYTES:
                oldest = next(iter(self._free))
                del self._free[oldest]
                self._forgotten.append(oldest)

    def forgotten(self) -> list[int]:
        """Segments that will not be used again, each told once."""
        return _drain(self._forgotten)

    def close(self) -> None:
        """Let go of all."""
        with self._lock:
            for segment in [*self._free.values(), *self._lent.values()]:
                segment.sent()
            self._free.clear()
            self._lent.clear()

    def _new(self, size: int) -> Segment:
        size = -(-size // _ROUND) * _ROUND
        fd = memory_file()
        try:
            os.ftruncate(fd, size)
            memory = mmap.mmap(fd, size)
        except BaseException:
            os.close(fd)
            raise
        self._last += 1
        return Segment(self._last, memory, fd)


class Lease(np.ndarray):
    """The bytes of a borrowed segment: the base of every array in it, so its end is theirs."""


class Loans:
    """The receiver's mappings."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._returned: deque[int] = deque()

    def borrow(self, ident: int, fd: int | None) -> Lease:
        """The bytes of a segment that came with a message; `fd` when it came for the first time."""
        if fd is not None:
            self._maps[ident] = mmap.mmap(fd, 0)
        memory = self._maps[ident]
        lease = Lease((len(memory),), np.uint8, memory)
        # Called wherever the last array goes, perhaps inside any other call: it may do no more than this.
        weakref.finalize(lease, self._returned.append, ident).atexit = False
        return lease

    def returned(self) -> list[int]:
        """Segments in which no array is left, each told once."""
        return _drain(self._returned)

    def forget(self, ids: Iterable[int]) -> None:
        """These will not come again."""
        for ident in ids:
            self._maps.pop(ident, None)

    def close(self) -> None:
        """Mappings live on as long as their arrays."""
        self._maps.clear()


def _drain(ids: deque[int]) -> list[int]:
    return [ids.popleft() for _ in range(len(ids))]
