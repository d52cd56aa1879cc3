"""The requests that have not ended, and what the ranks know of them.

The engine's lock guards it, but for `advance` and `begin`, which only the loop calls and which tell events.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import TypeAlias

from saggar.engine.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineClosed,
    EngineError,
    InvalidRequest,
    OutOfMemory,
    RanksParted,
    RowFailed,
    WorkerDied,
)
from saggar.engine.handle import Stream
from saggar.engine.live import Deadlines, Live, OnEvent
from saggar.engine.request import Output, Request
from saggar.engine.sched.base import Decision, Entry, Scheduler, Status
from saggar.engine.worker.plan import Plan, Report, RowReport

Ending: TypeAlias = tuple[Live, Output | EngineError]
Interrupt: TypeAlias = Callable[[int, int, Sequence[str]], None]
DEATHS = 2
"""A request whose ranks failed so often while it ran is not tried again."""


class Book:
    """`interrupt` tells a replica's ranks to end requests of the plan under way before their next step."""

    def __init__(self, scheduler: Scheduler, interrupt: Interrupt, numerics: str, decode_rows: int) -> None:
        self._scheduler = scheduler
        self._interrupt = interrupt
        self._numerics = numerics
        self._decode_rows = decode_rows
        self._lives: dict[str, Live] = {}
        self._deadlines = Deadlines()
        self._drops: defaultdict[int, list[str]] = defaultdict(list)
        self._under_way: dict[int, Plan] = {}
        self._seq = itertools.count()
        self._plans = itertools.count(1)
        self._outcomes: Counter[str] = Counter()
        self._rank_counters: dict[int, dict[str, int]] = {}

    def counts(self) -> dict[str, int]:
        """`ended.<state>`, and the ranks' forwards and rows by branch."""
        totals = Counter({f"ended.{state}": count for state, count in self._outcomes.items()})
        for counters in self._rank_counters.values():
            totals.update(counters)
        return dict(totals)

    def next_deadline(self) -> float | None:
        """The nearest deadline."""
        return self._deadlines.next()

    # -- in

    def check_new(self, requests: Sequence[Request]) -> None:
        """InvalidRequest: an id is in use, or stands twice among the requests."""
        seen: set[str] = set()
        for request in requests:
            if request.id in self._lives or request.id in seen:
                text = f"{request.id!r} is already in the engine"
                raise InvalidRequest("id", text, "an id that is not in use")
            seen.add(request.id)

    def open(
        self,
        request: Request,
        key: str,
        cost: int,
        stream: Stream,
        on_event: OnEvent | None,
        tokens: int = 1,
    ) -> Live:
        """Take a checked request in; it waits."""
        now = time.monotonic()
        deadline = None if request.deadline_s is None else now + request.deadline_s
        entry = Entry(
            request, key, next(self._seq), now, cost, deadline, tokens=tokens, suspect=request.suspect
        )
        live = self._lives[request.id] = Live(entry, stream, on_event)
        live.deaths = DEATHS - 1 if request.suspect else 0
        self._deadlines.add(entry)
        self._scheduler.add(entry)
        return live

    # -- through

    def plan(self, decision: Decision, replica: int = 0) -> Plan | None:
        """The decision in the words of a replica's ranks; None when there is nothing for them to do."""
        if not decision.run and not self._drops[replica]:
            return None
        fresh = [entry for entry in decision.run if self._lives[entry.id].replica is None]
        for entry in fresh:
            self._lives[entry.id].replica = replica
        plan = self._under_way[replica] = Plan(
            id=next(self._plans),
            run=tuple(entry.id for entry in decision.run),
            admit=tuple(entry.request for entry in fresh),
            drop=tuple(self._drops.pop(replica, ())),
            steps=decision.steps,
            decode_rows=self._decode_rows,
        )
        return plan

    def begin(self, plan: Plan) -> None:
        """Tell those that start with this plan."""
        for request in plan.admit:
            live = self._lives.get(request.id)
            if live is not None:
                live.started()

    def advance(self, rows: Sequence[RowReport]) -> None:
        """Tell of steps, previews and chunks."""
        for row in rows:
            live = self._lives.get(row.id)
            if live is not None:
                live.advance(row)
                if live.stopping is not None:
                    self._stop_running(live)

    def update(self, plan: Plan, report: Report, replica: int = 0) -> list[Ending]:
        """Take over what the ranks report at the end of a plan; returns the requests that have ended."""
        lines = {row.id: row for row in report.rows}
        self._rank_counters[replica] = report.counters
        endings = self.expire(time.monotonic())
        if self._under_way.pop(replica, None) is None:
            return endings  # everything was ended while the ranks worked
        for request_id in plan.run:
            live = self._lives[request_id]
            outcome = self._outcome(live, lines.get(request_id))
            if outcome is not None:
                endings.append(self._end(live, outcome))
        return endings

    def put_back(self, error: WorkerDied, replica: int = 0) -> list[Ending]:
        """The replica's ranks have failed and all that they knew is lost: their requests wait again.

        Those that were running are run again alone, once: returns those that have ended.
        """
        last = OutOfMemory(str(error)) if isinstance(error, RanksParted) and error.memory else error
        plan = self._under_way.pop(replica, None)
        self._drops.pop(replica, None)
        endings: list[Ending] = []
        for live in [live for live in self._lives.values() if live.replica == replica]:
            live.replica = None
            if plan is not None and live.entry.id in plan.run:
                live.deaths += 1
            if live.stopping is not None or live.deaths >= DEATHS:
                endings.append(self._end(live, live.stopping or last))
            else:
                live.entry.suspect = live.deaths > 0
                self._scheduler.put_back(live.entry)
        return endings

    # -- out

    def cancel(self, request_id: str) -> tuple[bool, list[Ending]]:
        """Whether there is such a request; the list holds it if it has ended at once."""
        live = self._lives.get(request_id)
        if live is None:
            return False, []
        return True, self._stop(live, Cancelled(f"{request_id} was cancelled"))

    def expire(self, now: float) -> list[Ending]:
        """Stop the requests whose deadline has passed; returns those that have ended at once."""
        endings: list[Ending] = []
        for live in self._deadlines.due(now, self._lives):
            endings += self._stop(live, DeadlineExceeded(f"{live.entry.id}: its deadline passed"))
        return endings

    def interrupt(self) -> None:
        """End the plans under way at their next border."""
        for replica, plan in self._under_way.items():
            self._interrupt(replica, plan.id, plan.run)

    def end_all(self, error: EngineError) -> list[Ending]:
        """Everything ends with this error."""
        self._under_way.clear()
        return [self._end(live, error) for live in list(self._lives.values())]

    def _stop(self, live: Live, reason: EngineError) -> list[Ending]:
        if live.entry.status is not Status.RUNNING or live.replica not in self._under_way:
            return [self._end(live, reason)]
        live.stopping = live.stopping or reason
        self._stop_running(live)
        return []

    def _stop_running(self, live: Live) -> None:
        replica = live.replica
        if replica is not None and replica in self._under_way:
            self._interrupt(replica, self._under_way[replica].id, [live.entry.id])

    def _outcome(self, live: Live, row: RowReport | None) -> Output | EngineError | None:
        """How the request has ended, None if it has not."""
        if row is None:
            return RowFailed("the ranks reported nothing of this request")
        if row.error is not None or live.stopping is not None:
            return row.error or live.stopping
        if row.status == "dropped":
            return EngineClosed("the engine was closed")
        if row.status != "done":
            return None
        asked = live.entry.request.num_outputs
        if not row.media or len(row.media) % asked:
            return RowFailed(f"{asked} outputs were asked for and {len(row.media)} came")
        return live.output(row, self._numerics)

    def _end(self, live: Live, outcome: Output | EngineError) -> Ending:
        if isinstance(outcome, Output):
            status = Status.COMPLETED
        else:
            aborted = isinstance(outcome, Cancelled | DeadlineExceeded | EngineClosed)
            status = Status.ABORTED if aborted else Status.ERROR
            if live.replica is not None:
                self._drops[live.replica].append(live.entry.id)
        self._scheduler.leave(live.entry, status)
        del self._lives[live.entry.id]
        self._outcomes[status.value] += 1
        return live, outcome
