"""The loop: schedule → execute → update → deliver, one thread for each group of ranks.

A group that fails is started anew; what it was doing goes back to the scheduler first.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from saggar.engine.config import Patience
from saggar.engine.errors import EngineClosed, EngineError, LoadError, WorkerDied
from saggar.engine.executor.base import Executor
from saggar.engine.hub import Hub
from saggar.engine.request import Output
from saggar.engine.worker.agreement import differences
from saggar.engine.worker.plan import Call, Plan, Ready, RowReport

LIVENESS_S = 1.0
"""How often an idle loop looks whether its ranks live."""


class Failures:
    """When a group failed since it last did what it is for, and whether and when it is worth another start.

    What a request's success forgives is a request's fault, not the machine's: any number of requests that kill their
    ranks are outlived while others succeed between them.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._times: deque[float] = deque()

    def add(self, now: float) -> float | None:
        """Count one: seconds to wait before the next start, None: there were too many."""
        self._times.append(now)
        while now - self._times[0] > self._patience.failures_within_s:
            self._times.popleft()
        if len(self._times) >= self._patience.failures:
            return None
        return self._patience.backoff_s * float(2 ** (len(self._times) - 1))

    def forgive(self) -> None:
        """A request succeeded: the group is sound."""
        self._times.clear()


class Loop:
    """One replica. `ready` is what its ranks said when they began: they must say the same after a restart."""

    def __init__(
        self,
        replica: int,
        executor: Executor,
        ready: Ready,
        hub: Hub,
        patience: Patience,
    ) -> None:
        self.replica = replica
        self.executor = executor
        self._ready = ready
        self._hub = hub
        self._failures = Failures(patience)
        self._calls: deque[tuple[Call, Future[list[object]]]] = deque()
        self.thread = threading.Thread(target=self._run, name=f"saggar-engine-{replica}", daemon=True)

    def call(self, call: Call) -> Future[list[object]]:
        """Under the hub's lock: have the ranks called between two plans; one result a rank."""
        answer: Future[list[object]] = Future()
        self._calls.append((call, answer))
        return answer

    def _run(self) -> None:
        try:
            while True:
                try:
                    self._serve()
                except WorkerDied as error:
                    self._restart(error)
        except EngineError as error:
            self._end(error)
        except BaseException as error:
            self._end(EngineError(f"the engine's loop failed: {error!r}"))
            raise
        finally:
            self.executor.close()

    def _serve(self) -> None:
        """Raises EngineClosed or WorkerDied."""
        while True:
            self._execute(self._schedule())

    def _execute(self, plan: Plan) -> None:
        """In a frame of its own: what waits for the next plan keeps nothing of this one's inputs and outputs."""
        hub = self._hub
        hub.book.begin(plan)
        hub.tell_room()
        report = self.executor.execute(plan, self._on_step)
        hub.book.advance(report.rows)
        with hub.lock:
            ended = hub.book.update(plan, report, self.replica)
        if any(isinstance(outcome, Output) for _, outcome in ended):
            self._failures.forgive()
        hub.deliver(ended)

    def _schedule(self) -> Plan:
        """Wait for something to do and return it as a plan."""
        hub = self._hub
        while True:
            self._answer_calls()
            with hub.lock:
                self._check_open()
                now = time.monotonic()
                plan, ended, wake_at = hub.next_plan(self.replica, now)
                if plan is None and not ended and not self._calls:
                    hub.lock.wait(max(0.0, min(wake_at or now + LIVENESS_S, now + LIVENESS_S) - now))
                    self._check_ranks()
            hub.deliver(ended)
            if plan is not None:
                return plan

    def _on_step(self, rows: Sequence[RowReport]) -> None:
        """Called by the executor between the steps of a plan."""
        self._hub.book.advance(rows)
        self._hub.expire()

    def _answer_calls(self) -> None:
        while self._calls:
            call, answer = self._calls.popleft()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                replies = self.executor.call(call, self._hub.expire)
            except WorkerDied as error:
                answer.set_exception(error)
                raise
            failure = next((reply.error for reply in replies if reply.error is not None), None)
            if failure is not None:
                answer.set_exception(failure)
            else:
                answer.set_result([reply.value for reply in replies])

    def _check_open(self) -> None:
        if self._hub.over is not None:
            raise EngineClosed(*self._hub.over.args)

    def _check_ranks(self) -> None:
        health = self.executor.health()
        if not health.ok:
            raise WorkerDied(health.reason)

    # -- after a failure

    def _restart(self, error: EngineError) -> None:
        """Give back what the ranks were doing and start them anew. WorkerDied: too often; EngineClosed."""
        hub = self._hub
        while True:
            self.executor.abort()
            with hub.lock:
                self._check_open()
            hub.fail(self.replica, error)
            wait = self._failures.add(time.monotonic())
            if wait is None:
                raise WorkerDied(f"the ranks failed too often, at last: {error}")
            self._pass(wait)
            try:
                self._check_same(self.executor.start(self._while_starting))
                break
            except EngineError as again:
                error = again
        hub.recover(self.replica)

    def _pass(self, seconds: float) -> None:
        """Let time pass; deadlines are kept. EngineClosed."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            self._while_starting()
            with self._hub.lock:
                times = [time for time in (end, self._hub.book.next_deadline()) if time is not None]
                if self._hub.over is None:
                    self._hub.lock.wait(max(0.0, min(times) - now))

    def _while_starting(self) -> None:
        with self._hub.lock:
            self._check_open()
        self._hub.expire()

    def _check_same(self, ready: Ready) -> None:
        changed = differences(self._ready.agreed, ready.agreed)
        if changed:
            raise LoadError(f"the ranks are others than before, in their {', '.join(changed)}")

    def _end(self, error: EngineError) -> None:
        """This replica does nothing more."""
        self._hub.leave(self.replica, error)
        with self._hub.lock:
            calls, self._calls = self._calls, deque()
        for _, answer in calls:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)
