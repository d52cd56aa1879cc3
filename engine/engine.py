"""The engine: schedule → execute → update → deliver, in one thread. Requests come in from any thread, arrays
go out.

It knows no model and no device; with the `multiproc` executor its process never imports torch.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TypeAlias

from saggar.engine.config import EngineConfig
from saggar.engine.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineClosed,
    EngineError,
    InvalidRequest,
    RowFailed,
    WorkerDied,
)
from saggar.engine.executor import make_executor
from saggar.engine.executor.base import Executor, Health
from saggar.engine.handle import Handle, Reservation, Stream
from saggar.engine.live import Deadlines, Live, OnEvent
from saggar.engine.models.registry import AnyFamily, open_family
from saggar.engine.progress import Bar
from saggar.engine.request import ModelInfo, Output, Request, Room
from saggar.engine.sched.base import Announced, Decision, Entry, Scheduler, Status
from saggar.engine.sched.policy import KeyedScheduler, Rules
from saggar.engine.worker.plan import Plan, Report, RowReport

Ending: TypeAlias = tuple[Live, Output | EngineError]
_JOIN_S = 10.0
LIVENESS_S = 1.0
"""How often an idle engine looks whether its ranks live."""


class Engine:
    """Built by `Engine.make`; close it, or use it as a context manager. All methods are thread-safe."""

    def __init__(
        self, config: EngineConfig, family: AnyFamily, executor: Executor, scheduler: Scheduler
    ) -> None:
        self.config = config
        self._family = family
        self._executor = executor
        self._scheduler = scheduler
        ready = executor.start()
        self.info: ModelInfo = family.info(config.model, config.max_batch, ready.numerics)
        self._lock = threading.Condition()
        self._live: dict[str, Live] = {}
        self._deadlines = Deadlines()
        self._drops: list[str] = []
        self._paused = False
        self._over: EngineError | None = None
        self._seq = itertools.count()
        self._plans = itertools.count(1)
        self._under_way: Plan | None = None
        self._outcomes: Counter[str] = Counter()
        self._rank_counters: dict[str, int] = {}
        self._watchers: list[Callable[[], None]] = []
        self._seats_told = 0
        self._thread = threading.Thread(target=self._loop, name="saggar-engine", daemon=True)
        self._thread.start()

    @classmethod
    def make(
        cls, config: EngineConfig, *, scheduler: Scheduler | None = None, executor: Executor | None = None
    ) -> Engine:
        """Build, load and warm up; a family that streams turns step batching on. Whatever fails is raised:
        Unsupported, LoadError, WorkerDied, a warm-up's error.
        """
        family = open_family(config.model)
        config = replace(config, mode="step_batch") if family.streaming else config
        executor = executor or make_executor(config)
        try:
            return cls(config, family, executor, scheduler or KeyedScheduler(Rules.of(config)))
        except BaseException:
            executor.close()
            raise

    # -- requests

    def validate(self, request: Request) -> Request:
        """The request with its parameters filled in. InvalidRequest names the field and what is allowed."""
        return self._family.validate(request)

    def batch_key(self, request: Request) -> str:
        """What requests must share to run together. InvalidRequest as in `validate`."""
        return self._family.batch_key(self._family.validate(request))

    def submit(
        self, request: Request, *, reservation: Reservation | None = None, on_event: OnEvent | None = None
    ) -> Handle:
        """Take a request in. `on_event` is called in the engine's thread: be brief.

        Raises InvalidRequest, EngineClosed or WorkerDied; the reservation then stays with the caller.
        """
        return self._enter([request], reservation, on_event)[0]

    def generate(self, requests: Sequence[Request], progress: bool = False) -> list[Output]:
        """Run all and wait; outputs in the order of the requests. Raises the first error, after all have
        ended.
        """
        bar = Bar(len(requests), progress)
        handles = self._enter(requests, None, bar)
        errors = [handle.wait() for handle in handles]
        for error in errors:
            if error is not None:
                raise error
        return [handle.result() for handle in handles]

    def cancel(self, request_id: str) -> bool:
        """End a request: at once if it waits, before its next step if it runs. False: unknown or ended."""
        with self._lock:
            live = self._live.get(request_id)
            ended = self._stop(live, Cancelled(f"{request_id} was cancelled")) if live else []
        self._deliver(ended)
        return live is not None

    # -- seats, for whoever fetches work

    def reserve(self, key: str, rows: int) -> Reservation:
        """Announce rows of a key: they are counted in `room`, and the batch of the key is held open for
        them.
        """
        with self._lock:
            announced = self._scheduler.reserve(key, rows, time.monotonic())
            self._seats_told = min(self._seats_told, self._room().seats)
            return Reservation(announced, self._release)

    def room(self) -> Room:
        """What the engine would take now."""
        with self._lock:
            return self._room()

    def on_room(self, callback: Callable[[], None]) -> None:
        """Call back, from any thread, whenever `room().seats` has grown."""
        with self._lock:
            self._watchers.append(callback)
            self._seats_told = self._room().seats

    # -- the engine as a whole

    def pause(self) -> None:
        """Stop at the next border and take no step until `resume`; requests are still taken in."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        """Go on."""
        with self._lock:
            self._paused = False
            self._lock.notify_all()
        self._tell_room()

    def stats(self) -> dict[str, int]:
        """Counts: the scheduler's, `ended.<state>`, and the ranks' forwards and rows by branch."""
        with self._lock:
            ended = {f"ended.{state}": count for state, count in self._outcomes.items()}
            return {**self._scheduler.counts(), **ended, **self._rank_counters}

    def health(self) -> Health:
        """Whether it serves; says why not."""
        over = self._over
        health = self._executor.health()
        return health if over is None or not health.ok else Health(False, health.pids, str(over))

    def close(self) -> None:
        """End everything: what has not ended gets EngineClosed at the next border. Again: nothing happens."""
        with self._lock:
            self._over = self._over or EngineClosed("the engine was closed")
            if self._under_way is not None:
                self._executor.cancel(self._under_way.id, self._under_way.run)
            self._lock.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)
        self._executor.close()
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the loop

    def _loop(self) -> None:
        try:
            while (plan := self._schedule()) is not None:
                report = self._executor.execute(plan, self._on_step)
                self._deliver(self._update(plan, report))
        except WorkerDied as error:
            self._give_up(error)
        except BaseException as error:
            self._give_up(EngineError(f"the engine's loop failed: {error!r}"))
            raise
        else:
            self._give_up(EngineClosed("the engine was closed"))

    def _schedule(self) -> Plan | None:
        """Wait for something to do and return it as a plan; None once the engine is over."""
        while True:
            with self._lock:
                if self._over is not None:
                    return None
                now = time.monotonic()
                ended = self._expire(now)
                decision = Decision() if self._paused else self._scheduler.schedule(now)
                plan = self._plan(decision)
                if plan is None and not ended:
                    self._lock.wait(self._until(decision.wake_at, now))
                    self._check_ranks()
            self._deliver(ended)
            if plan is not None:
                for request in plan.admit:
                    self._live[request.id].started()
                self._tell_room()
                return plan

    def _plan(self, decision: Decision) -> Plan | None:
        if not decision.run and not self._drops:
            return None
        lives = [self._live[entry.id] for entry in decision.run]
        fresh = [live for live in lives if not live.sent]
        for live in fresh:
            live.sent = True
        drops, self._drops = tuple(self._drops), []
        run = tuple(live.entry.id for live in lives)
        admit = tuple(live.entry.request for live in fresh)
        self._under_way = Plan(next(self._plans), run, admit, drops, decision.steps, self.config.decode_rows)
        return self._under_way

    def _on_step(self, rows: Sequence[RowReport]) -> None:
        """Called by the executor between the steps of a plan."""
        self._advance(rows)
        with self._lock:
            ended = self._expire(time.monotonic())
        self._deliver(ended)

    def _advance(self, rows: Sequence[RowReport]) -> None:
        for row in rows:
            live = self._live.get(row.id)
            if live is not None:
                live.advance(row)
                if live.stopping is not None and self._under_way is not None:
                    self._executor.cancel(self._under_way.id, [row.id])

    def _update(self, plan: Plan, report: Report) -> list[Ending]:
        """Take over what the ranks report; returns the requests that have ended."""
        self._advance(report.rows)
        lines = {row.id: row for row in report.rows}
        with self._lock:
            self._rank_counters = report.counters
            endings = self._expire(time.monotonic())
            self._under_way = None
            for request_id in plan.run:
                live = self._live[request_id]
                outcome = self._outcome(live, lines.get(request_id))
                if outcome is not None:
                    endings += self._end(live, outcome)
            return endings

    def _outcome(self, live: Live, row: RowReport | None) -> Output | EngineError | None:
        """How the request has ended, None if it has not."""
        if row is None:
            return RowFailed("the ranks reported nothing of this request")
        if row.error is not None or live.stopping is not None:
            return row.error or live.stopping
        if row.status == "dropped":
            return self._over or Cancelled(f"{row.id} was cancelled")
        if row.status != "done":
            return None
        if len(row.arrays) != live.entry.request.num_outputs:
            return RowFailed(
                f"{live.entry.request.num_outputs} outputs were asked for and {len(row.arrays)} came"
            )
        return live.output(row, self.info.numerics)

    def _deliver(self, endings: Iterable[Ending]) -> None:
        """Tell whoever waits; never under the lock, since callbacks may call the engine."""
        any_ended = False
        for live, outcome in endings:
            live.finish(outcome)
            any_ended = True
        if any_ended:
            self._tell_room()

    # -- helpers; those that change state are called under the lock

    def _enter(
        self, requests: Sequence[Request], reservation: Reservation | None, on_event: OnEvent | None
    ) -> list[Handle]:
        checked = [self.validate(request) for request in requests]
        handles = []
        with self._lock:
            if self._over is not None:
                raise self._over
            self._check_new(checked)
            for request in checked:
                stream = Stream()
                live = self._admit(request, stream, on_event)
                if reservation is not None:
                    self._scheduler.release(reservation.announced, request.rows)
                handles.append(Handle(request.id, live.future, stream, self.cancel))
            self._seats_told = min(self._seats_told, self._room().seats)
            self._lock.notify_all()
        return handles

    def _check_new(self, requests: Sequence[Request]) -> None:
        seen: set[str] = set()
        for request in requests:
            if request.id in self._live or request.id in seen:
                raise InvalidRequest(
                    "id", f"{request.id!r} is already in the engine", "an id that is not in use"
                )
            seen.add(request.id)

    def _admit(self, request: Request, stream: Stream, on_event: OnEvent | None) -> Live:
        now = time.monotonic()
        deadline = None if request.deadline_s is None else now + request.deadline_s
        key, cost = self._family.batch_key(request), self._family.cost(request)
        entry = Entry(request, key, next(self._seq), now, cost, deadline)
        live = self._live[request.id] = Live(entry, stream, on_event)
        self._deadlines.add(entry)
        self._scheduler.add(entry)
        return live

    def _expire(self, now: float) -> list[Ending]:
        due = self._deadlines.due(now, self._live)
        reasons = [DeadlineExceeded(f"{live.entry.id}: its deadline passed") for live in due]
        return [end for live, reason in zip(due, reasons, strict=True) for end in self._stop(live, reason)]

    def _stop(self, live: Live, reason: EngineError) -> list[Ending]:
        if live.entry.status is not Status.RUNNING or self._under_way is None:
            return self._end(live, reason)
        live.stopping = live.stopping or reason
        self._executor.cancel(self._under_way.id, [live.entry.id])
        return []

    def _end(self, live: Live, outcome: Output | EngineError) -> list[Ending]:
        aborted = isinstance(outcome, Cancelled | DeadlineExceeded | EngineClosed)
        status = Status.ABORTED if aborted else Status.ERROR
        self._scheduler.leave(live.entry, Status.COMPLETED if isinstance(outcome, Output) else status)
        del self._live[live.entry.id]
        self._outcomes[live.entry.status.value] += 1
        if live.sent and status is Status.ABORTED:
            self._drops.append(live.entry.id)
            self._lock.notify_all()
        return [(live, outcome)]

    def _give_up(self, error: EngineError) -> None:
        """Everything that has not ended ends with this error, and nothing more is taken."""
        with self._lock:
            self._over = self._over or error
            ended = [end for live in list(self._live.values()) for end in self._end(live, self._over)]
        self._deliver(ended)

    def _check_ranks(self) -> None:
        health = self._executor.health()
        if not health.ok:
            raise WorkerDied(health.reason)

    def _release(self, announced: Announced) -> None:
        with self._lock:
            self._scheduler.release(announced)
            self._lock.notify_all()
        self._tell_room()

    def _room(self) -> Room:
        if self._over is not None or self._paused:
            return Room(0, None, 0)
        return self._scheduler.room(time.monotonic())

    def _tell_room(self) -> None:
        with self._lock:
            seats = self._room().seats
            grown, self._seats_told = seats > self._seats_told, seats
            watchers = list(self._watchers) if grown else []
        for callback in watchers:
            callback()

    def _until(self, wake_at: float | None, now: float) -> float:
        """Seconds to wait: to the scheduler's time, the next deadline, or the next look at the ranks."""
        times = [time for time in (wake_at, self._deadlines.next(), now + LIVENESS_S) if time is not None]
        return max(0.0, min(times) - now)
