"""Which requests run together: by batch key, priority class and age, within a capacity.

The choice for a new batch, in this order: the highest class that waits; in it a key whose oldest request
waits longer than `age_bound_s`; else the oldest key that can fill a batch; else the oldest key. Each
`ageing_s` of waiting lifts a request by one class, so that none starves.

In a key the order is class, then arrival. A request that does not fit is overtaken by smaller ones at most
`pass_limit` times; then nothing joins before it. The first of a new batch always fits.

It knows neither threads nor clocks, and nothing of what a step does.
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass

from saggar.engine.config import EngineConfig
from saggar.engine.request import INTERACTIVE, Room
from saggar.engine.sched.backlog import CLASSES, Backlog
from saggar.engine.sched.base import Announced, Decision, Entry, Status
from saggar.engine.sched.capacity import Capacity, Load

_WINDOW_PER_ROW = 4
"""Entries looked at for one batch, for each of its rows: bounds the search for one that fits."""


@dataclass(frozen=True)
class Rules:
    """The policy's numbers; see EngineConfig."""

    capacity: Capacity
    step_batch: bool = False
    admission_wait_s: float = 0.0
    admission_quiet_s: float = 0.0
    reservation_hold_s: float = 2.0
    age_bound_s: float = 30.0
    ageing_s: float = 300.0
    pass_limit: int = 16

    @classmethod
    def of(cls, config: EngineConfig) -> Rules:
        """The numbers of a configuration."""
        return cls(
            Capacity(config.max_batch, config.max_cost),
            config.mode == "step_batch",
            config.admission_wait_s,
            config.admission_quiet_s,
            config.reservation_hold_s,
            config.age_bound_s,
            config.ageing_s,
            config.pass_limit,
        )


class KeyedScheduler:
    """One batch runs at a time; its rows share a key. With `step_batch` its rows are chosen anew at each
    border.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._rows_limit = rules.capacity.max_rows
        self._backlog = Backlog(fill=self._rows_limit)
        self._running: list[Entry] = []
        self._reservations: list[Announced] = []
        self._counts: Counter[str] = Counter()
        self._name = secrets.token_hex(4)
        self._batches = 0

    def add(self, entry: Entry) -> None:
        """Take in a waiting entry."""
        assert entry.status is Status.WAITING, entry.status
        self._backlog.add(entry)

    def leave(self, entry: Entry, to: Status) -> None:
        """End an entry that waits, runs or is parked."""
        entry.move(to)
        if not self._backlog.discard(entry):
            self._running.remove(entry)

    def put_back(self, entry: Entry) -> None:
        """An entry that runs or is parked waits again in its old place."""
        if not self._backlog.discard(entry):
            self._running.remove(entry)
        entry.rewind()
        self._backlog.add(entry)

    def reserve(self, key: str, rows: int, now: float) -> Announced:
        """Announce rows of a key: seats are counted at once, and the key's batch is held open for them."""
        reservation = Announced(key, rows, now)
        self._reservations.append(reservation)
        return reservation

    def release(self, reservation: Announced, rows: int | None = None) -> None:
        """Rows arrived (or, with None, the rest will not come). Further calls change nothing."""
        reservation.rows -= reservation.rows if rows is None else min(rows, reservation.rows)
        if reservation.rows == 0 and not reservation.closed:
            reservation.closed = True
            self._reservations.remove(reservation)

    def schedule(self, now: float) -> Decision:
        """The next decision. With nothing to run it says when to ask again."""
        if self._running and not self._rules.step_batch:
            return Decision(run=tuple(self._running))
        if self._running:
            self._make_way(now)
        return self._join(now) if self._running else self._begin(now)

    def room(self, now: float) -> Room:
        """Seats for the next batch (and in the running one, if that is open), and the key that still has
        room.
        """
        held = self._backlog.rows + sum(one.rows for one in self._reservations)
        seats = max(0, self._rows_limit - held)
        if self._rules.step_batch and self._running:
            key = self._running[0].key
            free = self._rows_limit - sum(entry.rows for entry in self._running)
            closed = any(entry.suspect for entry in self._running)
            room = 0 if closed else max(0, free - self._held_rows(key))
            if room:
                return Room(seats + room, key, room)
        key_or_none = self._next_key(now)
        if key_or_none is None or seats == 0:
            return Room(seats, None, 0)
        room = min(seats, self._rows_limit - self._held_rows(key_or_none))
        return Room(seats, key_or_none if room > 0 else None, max(0, room))

    def counts(self) -> dict[str, int]:
        """Requests and rows waiting and running, batches and rows started, and `cut.<reason>` for each
        batch.
        """
        return {
            "waiting": len(self._backlog),
            "waiting_rows": self._backlog.rows,
            "running": len(self._running),
            "running_rows": sum(entry.rows for entry in self._running),
            "reserved_rows": sum(one.rows for one in self._reservations),
            **self._counts,
        }

    # -- a new batch

    def _begin(self, now: float) -> Decision:
        candidates = self._candidates(now)
        waits: list[float] = []
        for head in candidates:
            ready_at = self._ready_at(head, now)
            if ready_at <= now:
                return self._start(head)
            waits.append(ready_at)
        return Decision(wake_at=min(waits, default=None))

    def _candidates(self, now: float) -> list[Entry]:
        """Heads of the keys that may begin, the best first; the second differs when it can fill a batch."""
        best = self._choose(now)
        if best is None:
            return []
        filler = self._backlog.oldest_filler(best.priority)
        return [best] if filler is None or filler.key == best.key else [best, filler]

    def _choose(self, now: float) -> Entry | None:
        heads = [head for head in map(self._backlog.oldest, range(CLASSES)) if head is not None]
        if not heads:
            return None
        best = min(heads, key=lambda head: (self._aged_class(head, now), head.seq))
        if now - best.arrived > self._rules.age_bound_s:
            return best
        return self._backlog.oldest_filler(best.priority) or best

    def _aged_class(self, entry: Entry, now: float) -> int:
        return max(INTERACTIVE, entry.priority - int((now - entry.arrived) / self._rules.ageing_s))

    def _ready_at(self, head: Entry, now: float) -> float:
        """When the key's batch may start: at once if full or urgent, else after the waits for company."""
        key = head.key
        if self._rules.step_batch or self._backlog.rows_of(key) >= self._rows_limit:
            return now
        held_until = max((one.made_at for one in self._reservations if one.key == key), default=now)
        if held_until + self._rules.reservation_hold_s > now and self._is_announced(key):
            return held_until + self._rules.reservation_hold_s
        if head.priority == INTERACTIVE:
            return now
        heads = self._backlog.heads(key)
        eldest = min(entry.arrived for entry in heads)
        quiet = self._backlog.last_arrival(key) + self._rules.admission_quiet_s
        return min(eldest + self._rules.admission_wait_s, quiet)

    def _start(self, head: Entry) -> Decision:
        self._batches += 1
        self._counts["batches"] += 1
        load = self._rules.capacity.load(())
        joined, cut = self._admit(head.key, load, first=head)
        self._counts[f"cut.{cut}"] += 1
        for entry in joined:
            entry.cut = cut
        return self._decision(joined)

    # -- a batch that runs, at a step border

    def _make_way(self, now: float) -> None:
        """Park rows of a lower class when a higher one waits and cannot join otherwise."""
        best = next((head for head in map(self._backlog.oldest, range(CLASSES)) if head is not None), None)
        if best is None:
            return
        lower = [entry for entry in self._running if self._aged_class(entry, now) > best.priority]
        same_key = best.key == self._running[0].key
        if not same_key and len(lower) < len(self._running):
            return
        for entry in sorted(lower, key=lambda one: (-one.priority, -one.seq)):
            if same_key and self._rules.capacity.load(self._running).refusal(best) is None:
                break
            self._park(entry)

    def _park(self, entry: Entry) -> None:
        self._running.remove(entry)
        entry.move(Status.PREEMPTED)
        self._backlog.add(entry)
        self._counts["preempted"] += 1

    def _join(self, now: float) -> Decision:
        key = self._running[0].key
        load = self._rules.capacity.load(self._running)
        if load.full or self._others_are_due(key, now):
            return self._decision([])
        joined, _ = self._admit(key, load, first=None)
        return self._decision(joined)

    def _others_are_due(self, key: str, now: float) -> bool:
        """True when another key waited beyond the bound: then nobody joins, and the batch drains."""
        heads = map(self._backlog.oldest, range(CLASSES))
        return any(
            head and head.key != key and now - head.arrived > self._rules.age_bound_s for head in heads
        )

    # -- both

    def _admit(self, key: str, load: Load, first: Entry | None) -> tuple[list[Entry], str]:
        """Move entries of a key into the batch; returns them and why no more came."""
        refused: list[str] = []
        if first is not None:
            load.add(first)
            self._backlog.discard(first)

        def accept(entry: Entry) -> bool:
            if refused and refused[-1] == "owed":
                return False
            reason = load.refusal(entry)
            if reason is None:
                load.add(entry)
                return True
            if not load.full:
                entry.passed_over += 1
            refused.append("owed" if entry.passed_over > self._rules.pass_limit else reason)
            return False

        taken = [] if load.full else self._backlog.take(key, accept, _WINDOW_PER_ROW * self._rows_limit)
        joined = ([first] if first is not None else []) + taken
        for entry in joined:
            entry.move(Status.RUNNING)
        self._running.extend(joined)
        self._counts["rows"] += sum(entry.rows for entry in joined)
        return joined, self._cut(load, refused, key)

    def _cut(self, load: Load, refused: list[str], key: str) -> str:
        if load.alone or load.rows > self._rows_limit:
            return "alone"
        if load.full:
            return "full"
        if refused:
            return refused[0]
        return "late" if self._is_announced(key) else "drained"

    def _decision(self, admitted: list[Entry]) -> Decision:
        size = sum(entry.rows for entry in self._running)
        for entry in self._running:
            entry.batch_id = entry.batch_id if entry not in admitted else f"{self._name}-{self._batches}"
            entry.batch_size = max(entry.batch_size, size)
        return Decision(tuple(self._running), 1 if self._rules.step_batch else None)

    def _is_announced(self, key: str) -> bool:
        return any(one.key == key for one in self._reservations)

    def _held_rows(self, key: str) -> int:
        return self._backlog.rows_of(key) + sum(one.rows for one in self._reservations if one.key == key)

    def _next_key(self, now: float) -> str | None:
        head = self._choose(now)
        if head is not None:
            return head.key
        return self._reservations[0].key if self._reservations else None
