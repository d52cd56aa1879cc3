"""The engine: requests come in from any thread, arrays go out. Its loop is loop.py, one for each replica.

It knows no model and no device; with the `multiproc` executor its process never imports torch.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType

from saggar.engine.book import Book
from saggar.engine.config import EngineConfig
from saggar.engine.errors import EngineClosed, InvalidRequest, Unsupported, WorkerDied
from saggar.engine.executor import make_executor
from saggar.engine.executor.base import Executor, Health
from saggar.engine.handle import Handle, Reservation, Stream
from saggar.engine.hub import Hub
from saggar.engine.live import OnEvent
from saggar.engine.loop import Loop
from saggar.engine.models.registry import AnyFamily, open_family
from saggar.engine.parallel.check import check_start
from saggar.engine.progress import Bar
from saggar.engine.request import EngineEvent, ModelInfo, Output, Request, Room
from saggar.engine.sched.base import Scheduler
from saggar.engine.sched.policy import KeyedScheduler, Rules
from saggar.engine.worker.plan import Call, Ready

_JOIN_S = 10.0


class Engine:
    """Built by `Engine.make`; close it, or use it as a context manager. All methods are thread-safe."""

    def __init__(
        self, config: EngineConfig, family: AnyFamily, executors: Sequence[Executor], scheduler: Scheduler
    ) -> None:
        self.config = config
        self._pid = os.getpid()
        self._family = family
        readies = _start_all(executors)
        numerics = readies[0].numerics
        self.info: ModelInfo = family.info(config.model, config.max_batch, numerics)
        book = Book(scheduler, self._interrupt, numerics, config.decode_rows)
        self._hub = Hub(scheduler, book, len(executors))
        self._loops = [
            Loop(replica, executor, ready, self._hub, config.patience)
            for replica, (executor, ready) in enumerate(zip(executors, readies, strict=True))
        ]
        for loop in self._loops:
            loop.thread.start()

    @classmethod
    def make(
        cls,
        config: EngineConfig,
        *,
        scheduler: Scheduler | None = None,
        executors: Sequence[Executor] | None = None,
    ) -> Engine:
        """Build, load and warm up; a family that streams turns step batching on. Whatever fails is raised:
        Unsupported, LoadError, WorkerDied, a warm-up's error.
        """
        family = open_family(config.model)
        check_start(config, family)
        _check_warmup(config, family)
        config = replace(config, mode="step_batch") if family.streaming else config
        if config.mode == "step_batch" and not family.step_batching:
            raise Unsupported(
                f"{config.model}: a {family.checkpoint.class_name} is called as a whole: mode must be request_batch"
            )
        # Looked up once: ranks that each asked a hub could be told of different revisions.
        found = replace(config, model=str(family.checkpoint.folder))
        executors = executors or [make_executor(found, replica) for replica in range(config.replicas)]
        try:
            return cls(config, family, executors, scheduler or KeyedScheduler(Rules.of(config)))
        except BaseException:
            for executor in executors:
                executor.close()
            raise

    # -- requests

    def validate(self, request: Request) -> Request:
        """The request with its parameters filled in. InvalidRequest names the field and what is allowed."""
        if not isinstance(request, Request):
            raise InvalidRequest("request", f"{type(request).__name__} was given", "a Request")
        return self._family.validate(request)

    def batch_key(self, request: Request) -> str:
        """What requests must share to run together. InvalidRequest as in `validate`."""
        return self._family.batch_key(self.validate(request))

    def submit(
        self, request: Request, *, reservation: Reservation | None = None, on_event: OnEvent | None = None
    ) -> Handle:
        """Take a request in. `on_event` is called in the engine's thread: be brief.

        Raises InvalidRequest, EngineClosed, or WorkerDied once the ranks failed too often; the reservation then
        stays with the caller.
        """
        return self._enter([request], reservation, on_event)[0]

    def generate(self, requests: Iterable[Request], progress: bool = False) -> list[Output]:
        """Run all and wait; outputs in the order of the requests. Raises the first error, after all have
        ended. A wait that is interrupted, by Ctrl-C for one, cancels them.
        """
        wanted = list(requests)
        handles = self._enter(wanted, None, Bar(len(wanted), progress))
        try:
            errors = [handle.wait() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        for error in errors:
            if error is not None:
                raise error
        return [handle.result() for handle in handles]

    def stream(self, request: Request) -> AsyncIterator[EngineEvent]:
        """Submit and read the events in a coroutine; the last one is `output` or `error`. As `submit`."""
        return self.submit(request).aevents()

    def cancel(self, request_id: str) -> bool:
        """End a request: at once if it waits, before its next step if it runs. False: unknown or ended."""
        with self._hub.lock:
            known, ended = self._hub.book.cancel(request_id)
            self._hub.lock.notify_all()
        self._hub.deliver(ended)
        return known

    # -- seats, for whoever fetches work

    def reserve(self, key: str, rows: int) -> Reservation:
        """Announce rows of a key: they are counted in `room`, and the batch of the key is held open for
        them. InvalidRequest: they are none.
        """
        if not isinstance(key, str):
            raise InvalidRequest("key", f"{type(key).__name__} was given", "a batch key")
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise InvalidRequest("rows", f"{rows!r} was given", "an integer, at least 1")
        with self._hub.lock:
            announced = self._hub.scheduler.reserve(key, rows, time.monotonic())
            self._hub.seats_taken()
            return Reservation(announced, self._hub.release)

    def room(self) -> Room:
        """What the engine would take now: nothing while it is paused or its ranks are started anew."""
        with self._hub.lock:
            return self._hub.room()

    def on_room(self, callback: Callable[[], None]) -> None:
        """Call back, from any thread, whenever `room().seats` has grown. What it raises is logged."""
        self._hub.watch_room(callback)

    # -- the engine as a whole

    def pause(self) -> None:
        """Stop at the next border and take no step until `resume`; requests are still taken in."""
        with self._hub.lock:
            self._hub.paused = True

    def resume(self) -> None:
        """Go on."""
        with self._hub.lock:
            self._hub.paused = False
            self._hub.lock.notify_all()
        self._hub.tell_room()

    def stats(self) -> dict[str, int]:
        """Counts: the scheduler's, `ended.<state>`, and the ranks' forwards and rows by branch."""
        with self._hub.lock:
            return {**self._hub.scheduler.counts(), **self._hub.book.counts()}

    def health(self) -> Health:
        """Whether it serves, if only by one replica; what is wrong; and whether it is over."""
        with self._hub.lock:
            over, troubles = self._hub.over, dict(self._hub.troubles)
        found = [loop.executor.health() for loop in self._loops]
        pids = tuple(pid for health in found for pid in health.pids)
        if over is not None:
            return Health(False, pids, str(over), over=True)
        reasons = [troubles.get(index, health.reason) for index, health in enumerate(found)]
        return Health(not all(reasons), pids, "; ".join(filter(None, reasons)))

    def call(
        self, method: str, *args: object, timeout_s: float | None = None, rank: int | None = None
    ) -> list[object]:
        """Call a method of the ranks' extension between two plans: of all, one result a rank, or of one, counted
        through all replicas. TimeoutError: its time was over, and what had not begun never will. Unsupported: no such
        method or rank, or arguments that cannot travel.
        """
        if not isinstance(method, str):
            raise Unsupported(f"a method's name is a text, not {type(method).__name__}")
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._hub.lock:
            if self._hub.over is not None:
                raise self._hub.over
            answers = self._call(method, args, rank)
            self._hub.lock.notify_all()
        try:
            return [value for answer in answers for value in answer.result(_left(end))]
        finally:
            for answer in answers:
                answer.cancel()

    def start_profile(self) -> None:
        """Record what the ranks do from the next plan on."""
        self.call("start_profile")

    def stop_profile(self, folder: str) -> list[str]:
        """End the recording; a Chrome trace for each rank is written to the folder, their paths returned."""
        return [str(path) for path in self.call("stop_profile", folder)]

    def close(self) -> None:
        """End everything: what has not ended gets EngineClosed at the next border. Again: nothing happens.

        From a callback, in one of the engine's own threads, it returns at once, and the end comes after the callback's.
        In a fork nothing happens: the ranks are its parent's.
        """
        if os.getpid() != self._pid:
            return
        hub = self._hub
        with hub.lock:
            hub.over = hub.over or EngineClosed("the engine was closed")
            hub.book.interrupt()
            hub.lock.notify_all()
        threads = [loop.thread for loop in self._loops]
        if threading.current_thread() in threads:
            return
        end = time.monotonic() + _JOIN_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        for loop in self._loops:
            loop.executor.close()
        for thread in threads:
            thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- helpers

    def _enter(
        self, requests: Sequence[Request], reservation: Reservation | None, on_event: OnEvent | None
    ) -> list[Handle]:
        if os.getpid() != self._pid:
            raise EngineClosed("the engine belongs to the process that this one is a fork of")
        hub = self._hub
        checked = [self.validate(request) for request in requests]
        handles = []
        with hub.lock:
            if hub.over is not None:
                raise hub.over
            hub.book.check_new(checked)
            for request in checked:
                key, cost, stream = self._family.batch_key(request), self._family.cost(request), Stream()
                live = hub.book.open(
                    request, key, cost, stream, on_event, tokens=self._family.row_tokens(request)
                )
                if reservation is not None:
                    hub.scheduler.release(reservation.announced, request.rows)
                handles.append(Handle(request.id, live.future, stream, self.cancel))
            hub.seats_taken()
            hub.lock.notify_all()
        return handles

    def _call(self, method: str, args: tuple[object, ...], rank: int | None) -> list[Future[list[object]]]:
        ranks = self.config.ranks
        if rank is None:
            return [
                loop.call(Call(method, args)) for loop in self._loops if loop.replica not in self._hub.gone
            ]
        if not isinstance(rank, int) or not 0 <= rank < ranks * len(self._loops):
            raise Unsupported(f"there is no rank {rank!r}, but {ranks * len(self._loops)}")
        if rank // ranks in self._hub.gone:
            raise WorkerDied(self._hub.troubles[rank // ranks])
        return [self._loops[rank // ranks].call(Call(method, args, rank % ranks))]

    def _interrupt(self, replica: int, plan_id: int, request_ids: Iterable[str]) -> None:
        self._loops[replica].executor.cancel(plan_id, request_ids)


def _check_warmup(config: EngineConfig, family: AnyFamily) -> None:
    """Before anything is loaded. Unsupported names the field and what is allowed."""
    for kind in config.warmup:
        try:
            family.warmup_request(kind)
        except InvalidRequest as error:
            raise Unsupported(f"warmup: {error}") from error


def _start_all(executors: Sequence[Executor]) -> list[Ready]:
    """Start them side by side. Raises the first one's failure; the others then give up."""
    if len(executors) == 1:
        return [executors[0].start()]
    failed: list[BaseException] = []

    def go_on() -> None:
        if failed:
            raise EngineClosed("another replica could not start")

    def start(executor: Executor) -> Ready | None:
        try:
            return executor.start(go_on)
        except BaseException as error:  # noqa: BLE001  (raised below)
            failed.append(error)
            return None

    with ThreadPoolExecutor(len(executors)) as pool:
        readies = [ready for ready in pool.map(start, executors) if ready is not None]
    if failed:
        raise failed[0]
    return readies


def _left(end: float | None) -> float | None:
    return None if end is None else max(0.0, end - time.monotonic())
