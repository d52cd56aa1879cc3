"""A scheduler on a clock of its own, for its tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from saggar.engine.request import BULK, Request
from saggar.engine.sched.base import Decision, Entry, Status
from saggar.engine.sched.capacity import Capacity
from saggar.engine.sched.policy import KeyedScheduler, Rules


@dataclass
class Bench:
    """Drives a scheduler as the engine's loop does: one turn is one step, and takes one second."""

    rules: Rules
    now: float = 0.0
    scheduler: KeyedScheduler = field(init=False)
    entries: list[Entry] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    batches: list[list[str]] = field(default_factory=list)
    started: dict[str, float] = field(default_factory=dict)
    running: set[Entry] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.scheduler = KeyedScheduler(self.rules)

    def add(self, key: str, rows: int = 1, priority: int = BULK, steps: int = 1, cost: int = 0) -> Entry:
        seq = len(self.entries)
        request = Request(f"r{seq}", "", num_outputs=rows, priority=priority)
        entry = Entry(request, key, seq, self.now, cost)
        self.entries.append(entry)
        self.left[entry.id] = steps
        self.scheduler.add(entry)
        return entry

    def turn(self) -> Decision:
        decision = self.scheduler.schedule(self.now)
        self.check(decision)
        for entry in decision.run:
            if entry.id not in self.started:
                self.started[entry.id] = self.now
        if decision.run and self.running.isdisjoint(decision.run):
            self.batches.append([entry.id for entry in decision.run])
        self.running = set(decision.run)
        steps = decision.steps or min((self.left[entry.id] for entry in decision.run), default=0)
        for entry in decision.run:
            self.left[entry.id] -= steps
            if self.left[entry.id] == 0:
                self.scheduler.leave(entry, Status.COMPLETED)
        if not decision.run and decision.wake_at is not None:
            assert decision.wake_at > self.now
            self.now = decision.wake_at
        else:
            self.now += max(1, steps)
        return decision

    def drain(self, turns: int = 100_000) -> None:
        for _ in range(turns):
            counts = self.scheduler.counts()
            if counts["waiting"] + counts["running"] == 0:
                return
            self.turn()
        raise AssertionError("the scheduler does not come to an end")

    def check(self, decision: Decision) -> None:
        """What holds for any decision."""
        run = list(decision.run)
        assert len({entry.key for entry in run}) <= 1
        assert len({entry.id for entry in run}) == len(run)
        assert run == [] or set(run) == {entry for entry in self.entries if entry.status is Status.RUNNING}
        rows, cost = sum(entry.rows for entry in run), sum(entry.cost for entry in run)
        capacity = self.rules.capacity
        assert rows <= capacity.max_rows or len(run) == 1
        assert capacity.max_cost is None or cost <= capacity.max_cost or len(run) == 1


def bench(max_rows: int = 8, max_cost: int | None = None, **rules: Any) -> Bench:
    return Bench(Rules(Capacity(max_rows, max_cost), **rules))
