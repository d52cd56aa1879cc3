"""The engine: schedule → execute → update → deliver, in one thread. Requests come in from any thread, arrays
go out.

It knows no model and no device; with the `multiproc` executor its process never imports torch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType

from saggar.engine.book import Book, Ending
from saggar.engine.config import EngineConfig
from saggar.engine.errors import EngineClosed, EngineError, WorkerDied
from saggar.engine.executor import make_executor
from saggar.engine.executor.base import Executor, Health
from saggar.engine.handle import Handle, Reservation, Stream
from saggar.engine.live import OnEvent
from saggar.engine.models.registry import AnyFamily, open_family
from saggar.engine.progress import Bar
from saggar.engine.request import EngineEvent, ModelInfo, Output, Request, Room
from saggar.engine.sched.base import Announced, Decision, Scheduler
from saggar.engine.sched.policy import KeyedScheduler, Rules
from saggar.engine.worker.plan import Call, Plan, RowReport

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
        self._book = Book(scheduler, executor.cancel, ready.numerics, config.decode_rows)
        self._calls: deque[tuple[Call, Future[list[object]]]] = deque()
        self._paused = False
        self._over: EngineError | None = None
        self._closed_inside = False
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

    def stream(self, request: Request) -> AsyncIterator[EngineEvent]:
        """Submit and read the events in a coroutine; the last one is `output` or `error`. As `submit`."""
        return self.submit(request).aevents()

    def cancel(self, request_id: str) -> bool:
        """End a request: at once if it waits, before its next step if it runs. False: unknown or ended."""
        with self._lock:
            known, ended = self._book.cancel(request_id)
            self._lock.notify_all()
        self._deliver(ended)
        return known

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
            return {**self._scheduler.counts(), **self._book.counts()}

    def health(self) -> Health:
        """Whether it serves; says why not."""
        over = self._over
        health = self._executor.health()
        return health if over is None or not health.ok else Health(False, health.pids, str(over))

    def call(self, method: str, *args: object, timeout_s: float | None = None) -> list[object]:
        """Call a method of the ranks' extension between two plans; one result a rank. TimeoutError."""
        answer: Future[list[object]] = Future()
        with self._lock:
            if self._over is not None:
                raise self._over
            self._calls.append((Call(method, args), answer))
            self._lock.notify_all()
        return answer.result(timeout_s)

    def start_profile(self) -> None:
        """Record what the ranks do from the next plan on."""
        self.call("start_profile")

    def stop_profile(self, folder: str) -> list[str]:
        """End the recording; a Chrome trace for each rank is written to the folder, their paths returned."""
        return [str(path) for path in self.call("stop_profile", folder)]

    def close(self) -> None:
        """End everything: what has not ended gets EngineClosed at the next border. Again: nothing happens.

        From a callback, in the engine's own thread, it returns at once, and the end comes with the callback's.
        """
        with self._lock:
            self._over = self._over or EngineClosed("the engine was closed")
            self._book.interrupt()
            self._lock.notify_all()
        if threading.current_thread() is self._thread:
            self._closed_inside = True
            return
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
                self._book.advance(report.rows)
                with self._lock:
                    ended = self._book.update(plan, report)
                self._deliver(ended)
        except WorkerDied as error:
            self._give_up(error)
        except BaseException as error:
            self._give_up(EngineError(f"the engine's loop failed: {error!r}"))
            raise
        else:
            self._give_up(EngineClosed("the engine was closed"))
        finally:
            if self._closed_inside:
                self._executor.close()

    def _schedule(self) -> Plan | None:
        """Wait for something to do and return it as a plan; None once the engine is over."""
        while True:
            self._answer_calls()
            with self._lock:
                if self._over is not None:
                    return None
                now = time.monotonic()
                ended = self._book.expire(now)
                decision = Decision() if self._paused else self._scheduler.schedule(now)
                plan = self._book.plan(decision)
                if plan is None and not ended and not self._calls:
                    self._lock.wait(self._until(decision.wake_at, now))
                    self._check_ranks()
            self._deliver(ended)
            if plan is not None:
                self._book.begin(plan)
                self._tell_room()
                return plan

    def _on_step(self, rows: Sequence[RowReport]) -> None:
        """Called by the executor between the steps of a plan."""
        self._book.advance(rows)
        with self._lock:
            ended = self._book.expire(time.monotonic())
        self._deliver(ended)

    def _answer_calls(self) -> None:
        while self._calls:
            call, answer = self._calls.popleft()
            try:
                replies = self._executor.call(call)
            except WorkerDied as error:
                answer.set_exception(error)
                raise
            failure = next((reply.error for reply in replies if reply.error is not None), None)
            if failure is not None:
                answer.set_exception(failure)
            else:
                answer.set_result([reply.value for reply in replies])

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
            self._book.check_new(checked)
            for request in checked:
                key, cost, stream = self._family.batch_key(request), self._family.cost(request), Stream()
                live = self._book.open(request, key, cost, stream, on_event)
                if reservation is not None:
                    self._scheduler.release(reservation.announced, request.rows)
                handles.append(Handle(request.id, live.future, stream, self.cancel))
            self._seats_told = min(self._seats_told, self._room().seats)
            self._lock.notify_all()
        return handles

    def _give_up(self, error: EngineError) -> None:
        """Everything that has not ended ends with this error, and nothing more is taken."""
        with self._lock:
            self._over = self._over or error
            ended = self._book.end_all(self._over)
            calls, self._calls = self._calls, deque()
        self._deliver(ended)
        for _, answer in calls:
            answer.set_exception(self._over)

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
        times = [time for time in (wake_at, self._book.next_deadline(), now + LIVENESS_S) if time is not None]
        return max(0.0, min(times) - now)
