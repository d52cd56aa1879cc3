"""The attempts this worker has in hand, and the one thread that keeps the ledger and them in touch.

Each half second all that changed goes to the ledger in one round trip, whatever the number of jobs, and its answers
come back: go on, stop, or drop. A start or a change of phase is told at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import redis
from saggar.engine.request import EngineEvent
from saggar.jobs.ledger import Ledger, Orders

log = logging.getLogger(__name__)

PULSE_S = 0.5
CHECK_S = 2.0

Phase = Literal["waiting", "executing", "uploading"]


class Stoppable(Protocol):
    """A submitted request, or the fetching of its inputs."""

    def cancel(self) -> bool: ...


@dataclass
class Attempt:
    """One job in hand. The task's thread, the engine's and the pulse's write to it: each field has one writer.

    `suspicions` are the job's from before; `starts`: how often the engine began, again each time that its ranks died.
    `over` is set once whatever it makes will not be seen: it stops at the next chance.
    """

    job_id: str
    number: int
    token: str
    phase: Phase = "waiting"
    step: int = 0
    steps: int = 0
    drained: bool = False
    suspicions: int = 0
    starts: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    handle: Stoppable | None = None
    told: tuple[Phase, int] = ("waiting", 0)
    told_at: float = 0.0
    batch: dict[str, str | int | float | None] = field(default_factory=dict)
    checked_at: float = field(default_factory=time.monotonic)

    @property
    def wanted(self) -> bool:
        return not self.over.is_set()

    def has_news(self, now: float, pulse_s: float) -> bool:
        """A new phase at once, a new step after a pulse."""
        phase, step = self.told
        return self.phase != phase or (self.step != step and now - self.told_at >= pulse_s)

    def take(self, handle: Stoppable) -> None:
        """What is to be stopped from now on; at once if that was told before."""
        self.handle = handle
        if not self.wanted or self.drained:
            handle.cancel()

    def stop(self) -> None:
        """Ends the fetching of its inputs, or its request before the next step, if the engine has it."""
        if self.handle is not None:
            self.handle.cancel()


class Attempts:
    """All attempts in hand; thread-safe. `close` ends the thread."""

    def __init__(self, ledger: Ledger, pulse_s: float = PULSE_S) -> None:
        self._ledger = ledger
        self._pulse_s = pulse_s
        self._all: dict[str, Attempt] = {}
        self._lock = threading.Lock()
        self._bell = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._live, name="saggar-pulse", daemon=True)
        self._thread.start()

    def add(self, attempt: Attempt) -> None:
        with self._lock:
            self._all[attempt.token] = attempt
        self._bell.set()  # with nothing in hand the pulse rests

    def remove(self, attempt: Attempt) -> None:
        with self._lock:
            self._all.pop(attempt.token, None)

    def in_hand(self) -> list[Attempt]:
        with self._lock:
            return list(self._all.values())

    def listener(self, attempt: Attempt) -> Callable[[EngineEvent], None]:
        """What the engine calls with the request's events, in its own thread: it only takes notes."""

        def listen(event: EngineEvent) -> None:
            attempt.step, attempt.steps = event.step, event.steps or attempt.steps
            if event.kind == "started":
                attempt.batch = {"batch_id": event.batch_id, "batch_size": event.batch_size}
                attempt.starts += 1
                attempt.phase = "executing"
                self._bell.set()

        return listen

    def uploading(self, attempt: Attempt) -> None:
        attempt.phase = "uploading"
        self._bell.set()

    def cancel(self, job_id: str) -> None:
        """Somebody cancelled this job: the running request ends before its next step."""
        for attempt in self.in_hand():
            if attempt.job_id == job_id:
                self._obey(attempt, "cancel")

    def lost(self, token: str) -> None:
        """Another worker may have this delivery now."""
        with self._lock:
            attempt = self._all.get(token)
        if attempt is not None:
            self._obey(attempt, "fenced")

    def drain(self) -> None:
        """Gives back what does not execute yet."""
        for attempt in self.in_hand():
            if attempt.phase == "waiting":
                attempt.drained = True
                attempt.stop()

    def give_back(self) -> None:
        """What waits or executes, in the ledger: a worker that leaves is no crash. Raises redis.RedisError.

        What is being uploaded stays as it is: its manifest may stand in a moment, and then it must not be cancelled.
        """
        ops = self._ledger.ops
        given = [one for one in self.in_hand() if one.phase != "uploading"]
        self._ledger.runner.run_many([ops.requeue(one.job_id, one.number, "drained") for one in given])

    def busy_beside(self, attempt: Attempt) -> bool:
        """Whether the engine has, or will have, anything but this attempt."""
        return any(one is not attempt and one.phase != "uploading" for one in self.in_hand())

    def close(self) -> None:
        self._closed.set()
        self._bell.set()
        self._thread.join()

    def _live(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                self.pulse()
            except redis.RedisError as error:
                log.warning("the ledger does not answer, progress waits: %s", error)
            except Exception:  # one attempt must not silence those of the others
                log.exception("progress could not be told")
            self._bell.clear()
            # A bell ends the wait early, yet no more than twenty round trips are made in a second.
            if self._closed.wait(0.05):  # its bell may have been cleared above
                return
            idle = not self.in_hand()
            self._bell.wait(None if idle else max(0.0, self._pulse_s - (time.monotonic() - began)))

    def pulse(self) -> None:
        """One round trip: progress that is new, and a look at what has been silent. Raises redis.RedisError."""
        now = time.monotonic()
        news, silent = [], []
        for attempt in self.in_hand():
            if attempt.has_news(now, self._pulse_s):
                news.append(attempt)
            elif now - attempt.checked_at > CHECK_S:
                silent.append(attempt)
        if silent:
            orders = self._ledger.check([(attempt.job_id, attempt.number) for attempt in silent])
            for attempt in silent:
                attempt.checked_at = now
                self._obey(attempt, orders[attempt.job_id])
        self._tell(news, now)

    def _tell(self, news: list[Attempt], now: float) -> None:
        if not news:
            return
        notes = [(attempt, attempt.phase, attempt.step) for attempt in news]
        answers = self._ledger.runner.run_many(
            [
                self._ledger.ops.progress(
                    attempt.job_id,
                    attempt.number,
                    step,
                    attempt.steps,
                    kind="uploading" if phase == "uploading" else "progress",
                    data=dict(attempt.batch),
                )
                for attempt, phase, step in notes
            ]
        )
        for (attempt, phase, step), answer in zip(notes, answers, strict=True):
            if isinstance(answer, Exception):
                raise answer
            attempt.told, attempt.told_at, attempt.checked_at = (phase, step), now, now
            self._obey(attempt, answer)

    def _obey(self, attempt: Attempt, orders: Orders) -> None:
        if orders == "go":
            return
        # A fenced attempt may still have been committed by itself a moment ago: then nobody looks at `wanted`.
        attempt.over.set()
        attempt.stop()
