"""What the engine's threads share: the requests, the scheduler, who is served and who is told. No thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from saggar.engine.book import Book, Ending
from saggar.engine.errors import EngineError, WorkerDied
from saggar.engine.request import Room
from saggar.engine.sched.base import Announced, Decision, Scheduler
from saggar.engine.worker.plan import Plan

log = logging.getLogger(__name__)


class Hub:
    """Attributes are read and changed under `lock`, which is notified when there may be something to do.

    `over`: why nothing more is taken. `troubles`: the replicas that do not serve, and why; `gone`: those that never
    will again.
    """

    def __init__(self, scheduler: Scheduler, book: Book, replicas: int) -> None:
        self.lock = threading.Condition()
        self.scheduler = scheduler
        self.book = book
        self.paused = False
        self.over: EngineError | None = None
        self.troubles: dict[int, str] = {}
        self.gone: set[int] = set()
        self._replicas = replicas
        self._watchers: list[Callable[[], None]] = []
        self._seats_told = 0

    def next_plan(self, replica: int, now: float) -> tuple[Plan | None, list[Ending], float | None]:
        """Under the lock: what a replica does now, the requests whose time was over, and when to ask again."""
        ended = self.book.expire(now)
        decision = Decision() if self.paused else self.scheduler.schedule(now, replica)
        times = [time for time in (decision.wake_at, self.book.next_deadline()) if time is not None]
        return self.book.plan(decision, replica), ended, min(times, default=None)

    def expire(self) -> None:
        """End the requests whose deadline has passed."""
        with self.lock:
            ended = self.book.expire(time.monotonic())
        self.deliver(ended)

    def deliver(self, endings: Iterable[Ending]) -> None:
        """Tell whoever waits; never under the lock, since callbacks may call the engine."""
        any_ended = False
        for live, outcome in endings:
            live.finish(outcome)
            any_ended = True
        if any_ended:
            self.tell_room()

    def room(self) -> Room:
        """Under the lock: what would be taken now."""
        if self.over is not None or self.paused or len(self.troubles) == self._replicas:
            return Room(0, None, 0)
        return self.scheduler.room(time.monotonic())

    def watch_room(self, callback: Callable[[], None]) -> None:
        """Call back whenever the seats have grown."""
        with self.lock:
            self._watchers.append(callback)
            self._seats_told = self.room().seats

    def seats_taken(self) -> None:
        """Under the lock, after seats were given away: should they come back, that is growth."""
        if self._seats_told:
            self._seats_told = min(self._seats_told, self.room().seats)

    def tell_room(self) -> None:
        """Call the watchers if the seats have grown since they were last told."""
        with self.lock:
            seats = self.room().seats
            grown, self._seats_told = seats > self._seats_told, seats
            watchers = list(self._watchers) if grown else []
        for callback in watchers:
            try:
                callback()
            except (Exception, SystemExit):
                log.exception("somebody who watches the engine's room failed")

    def release(self, announced: Announced) -> None:
        """Announced rows that will not come."""
        with self.lock:
            self.scheduler.release(announced)
            self.lock.notify_all()
        self.tell_room()

    def fail(self, replica: int, error: EngineError) -> None:
        """A replica's ranks have failed: what they were doing goes back, and for a while it does not serve."""
        with self.lock:
            self._set_trouble(replica, str(error))
            death = error if isinstance(error, WorkerDied) else WorkerDied(str(error))
            ended = self.book.put_back(death, replica)
        self.deliver(ended)
        self.tell_room()

    def recover(self, replica: int) -> None:
        """A replica serves again."""
        with self.lock:
            self._set_trouble(replica, None)
        self.tell_room()

    def leave(self, replica: int, error: EngineError) -> None:
        """A replica ends. The last one, or one that ends because all is over, ends everything."""
        with self.lock:
            self.gone.add(replica)
            self._set_trouble(replica, str(error))
            last = len(self.gone) == self._replicas or self.over is not None
            ended = [] if last else self.book.put_back(WorkerDied(str(error)), replica)
        self.deliver(ended)
        if last:
            self.end(error)

    def end(self, error: EngineError) -> None:
        """Everything that has not ended ends with this error, and nothing more is taken."""
        with self.lock:
            self.over = self.over or error
            ended = self.book.end_all(self.over)
            self.lock.notify_all()
        self.deliver(ended)

    def _set_trouble(self, replica: int, reason: str | None) -> None:
        if reason is None:
            self.troubles.pop(replica, None)
        else:
            self.troubles[replica] = reason
        self.scheduler.use([index for index in range(self._replicas) if index not in self.troubles])
        self.lock.notify_all()
