"""Between the lane and the engine: the lane asks how much to fetch, the engine answers with the room it has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from saggar.engine.handle import Reservation
from saggar.engine.request import Room
from saggar.jobs.lanes import PRIORITY_CLASSES, Want
from saggar.jobs.ledger import is_alone
from saggar.workers.settings import URGENT_SEATS


class Seats(Protocol):
    """The part of the engine that the lane sees."""

    def room(self) -> Room: ...
    def reserve(self, key: str, rows: int) -> Reservation: ...


class EngineAppetite:
    """Late binding: a job is fetched only when the engine has a seat for it, so batches form from the whole backlog.

    Every fetched message holds a reservation until its task hands it to the engine (`take`) or the message goes. While
    a suspect is in hand, one that runs alone, nothing else is fetched.
    """

    def __init__(self, engine: Seats, max_batch: int, has_room: Callable[[], bool] = lambda: True) -> None:
        """`has_room` says whether finished outputs can be put somewhere; nothing is fetched while they cannot."""
        self._engine = engine
        self._has_room = has_room
        self._max_batch = max_batch
        self._reserved: dict[str, Reservation] = {}
        self._urgent: set[str] = set()
        self._alone: set[str] = set()
        self._lock = threading.Lock()
        self._open = True

    def close(self) -> None:
        """From now on nothing is fetched: the worker is stopping."""
        self._open = False

    def want(self, lane: str, free: int) -> Want:
        if not self._open or self._alone or not self._has_room():
            return Want(rows=0)
        urgent = self._urgent_left()
        room = self._engine.room()
        # A batch is begun whole or not at all: one begun in the seats that another left over would be cut by them, and
        # one begun with too few free threads by those. Both are free again in a moment.
        begin = room.seats - room.room >= self._max_batch and free >= self._max_batch + URGENT_SEATS
        return Want(
            rows=self._max_batch if begin else 0, open_key=room.open_key, room=room.room, urgent=urgent
        )

    def fetched(self, lane: str, key: str, priority_class: int, rows: Mapping[str, int]) -> None:
        with self._lock:
            if priority_class == PRIORITY_CLASSES["interactive"]:
                self._urgent.update(rows)
            if is_alone(key):
                self._alone.update(rows)
            for tag, count in rows.items():
                self._reserved[tag] = self._engine.reserve(key, count)

    def take(self, tag: str) -> Reservation | None:
        """The reservation of a message whose task now speaks to the engine itself."""
        with self._lock:
            return self._reserved.pop(tag, None)

    def gone(self, tag: str) -> None:
        with self._lock:
            self._urgent.discard(tag)
            self._alone.discard(tag)
        if reservation := self.take(tag):
            reservation.release()

    def _urgent_left(self) -> int:
        """How many interactive jobs are fetched although the engine has no seat: they overtake in the engine."""
        with self._lock:
            return max(0, URGENT_SEATS - len(self._urgent))
