"""How many bytes of decoded inputs a worker holds, so that fetching ahead does not fill its memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOOK_S = 0.1


class Hold:
    """Bytes that are held."""

    def __init__(self, give_back: Callable[[int], None], size: int) -> None:
        self._give_back, self._size = give_back, size

    def keep(self, size: int) -> None:
        """No more than so many are needed from now on."""
        if size < self._size:
            self._give_back(self._size - size)
            self._size = size


class Budget:
    """Room for `limit` bytes, given in the order of asking: what is large is not passed by for ever."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, size: int, over: threading.Event) -> Iterator[Hold | None]:
        """Waits for room, and gives it back at the end; None: `over` was set first, and nothing is held."""
        hold = Hold(self._give_back, size) if self._take(size, over) else None
        try:
            yield hold
        finally:
            if hold is not None:
                hold.keep(0)

    @contextmanager
    def hold_now(self, size: int) -> Iterator[Hold | None]:
        """As `hold`, without waiting; None: there is no room now, or somebody waits for it."""
        with self._changed:
            free = not self._queue and self.used + size <= self.limit
            self.used += size if free else 0
        hold = Hold(self._give_back, size) if free else None
        try:
            yield hold
        finally:
            if hold is not None:
                hold.keep(0)

    def _give_back(self, size: int) -> None:
        with self._changed:
            self.used -= size
            self._changed.notify_all()

    def _take(self, size: int, over: threading.Event) -> bool:
        me = object()
        with self._changed:
            self._queue.append(me)
            try:
                while self._queue[0] is not me or (self.used and self.used + size > self.limit):
                    if over.is_set():
                        return False
                    self._changed.wait(_LOOK_S)
                self.used += size
                return True
            finally:
                self._queue.remove(me)
                self._changed.notify_all()
