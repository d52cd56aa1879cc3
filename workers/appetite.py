"""Between the lane and the engine: the lane asks how much to fetch, the engine answers with the room it has."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from saggar.engine.handle import Reservation
from saggar.engine.request import Room
from saggar.jobs.lanes.appetite import Want


class Seats(Protocol):
    """The part of the engine that the lane sees."""

    def room(self) -> Room: ...
    def reserve(self, key: str, rows: int) -> Reservation: ...


class EngineAppetite:
    """Late binding: a job is fetched only when the engine has a seat for it, so batches form from the whole backlog.

    Every fetched message holds a reservation until its task hands it to the engine (`take`) or the message goes.
    """

    def __init__(self, engine: Seats) -> None:
        self._engine = engine
        self._reserved: dict[str, Reservation] = {}
        self._lock = threading.Lock()
        self._open = True

    def close(self) -> None:
        """From now on nothing is fetched: the worker is stopping."""
        self._open = False

    def want(self, lane: str, free: int) -> Want:
        if not self._open:
            return Want(rows=0, open_key=None, room=0)
        room = self._engine.room()
        return Want(rows=min(room.seats, free), open_key=room.open_key, room=room.room)

    def fetched(self, lane: str, key: str, priority_class: int, tags: Sequence[str], rows: int) -> None:
        each = rows // len(tags)
        extra = rows - each * len(tags)
        with self._lock:
            for index, tag in enumerate(tags):
                self._reserved[tag] = self._engine.reserve(key, each + (index < extra))

    def take(self, tag: str) -> Reservation | None:
        """The reservation of a message whose task now speaks to the engine itself."""
        with self._lock:
            return self._reserved.pop(tag, None)

    def gone(self, tag: str) -> None:
        if reservation := self.take(tag):
            reservation.release()
