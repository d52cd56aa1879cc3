"""What waits for a step, between the threads that bring it and those that take it."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """First in, first out. Thread-safe."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, item: T) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def take(self, most: int) -> list[T]:
        """At least one, once there is one; none when it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed)
            return [self._items.popleft() for _ in range(min(most, len(self._items)))]

    def take_back(self, item: T) -> bool:
        """Whether it still waited; then it does no longer, and it is the caller's."""
        with self._changed:
            if item not in self._items:
                return False
            self._items.remove(item)
            return True

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
