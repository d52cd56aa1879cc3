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
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from saggar.engine.batch_key import announced_key
from saggar.engine.config import EngineConfig
from saggar.engine.request import INTERACTIVE, Room
from saggar.engine.sched.backlog import CLASSES, Backlog
from saggar.engine.sched.base import Announced, Decision, Entry, Status
from saggar.engine.sched.capacity import Capacity, Load
from saggar.engine.sched.share import Share

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
    replicas: int = 1

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
            config.replicas,
        )


class KeyedScheduler:
    """Each replica runs one batch at a time; its rows share a key. With `step_batch` its rows are chosen anew at
    each border. Of several replicas the least loaded takes what waits.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._rows_limit = fill = rules.capacity.max_rows
        self._backlog = Backlog(fill)
        parked = [self._backlog if rules.replicas == 1 else Backlog(fill) for _ in range(rules.replicas)]
        self._shares = [Share(self._backlog, own) for own in parked]
        self._pools = {id(pool): pool for pool in (self._backlog, *parked)}.values()
        self._serving = list(self._shares)
        self._reservations: list[Announced] = []
        self._counts: Counter[str] = Counter()
        self._name = secrets.token_hex(4)

    def use(self, replicas: Collection[int]) -> None:
        """The replicas that serve now."""
        self._serving = [share for index, share in enumerate(self._shares) if index in replicas]

    def add(self, entry: Entry) -> None:
        """Take in a waiting entry."""
        assert entry.status is Status.WAITING, entry.status
        self._backlog.add(entry)

    def leave(self, entry: Entry, to: Status) -> None:
        """End an entry that waits, runs or is parked."""
        self._take_out(entry)
        entry.move(to)

    def put_back(self, entry: Entry) -> None:
        """An entry that runs or is parked waits again in its old place."""
        self._take_out(entry)
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

    def schedule(self, now: float, replica: int = 0) -> Decision:
        """The next decision for a replica. With nothing to run it says when to ask again."""
        share = self._shares[replica]
        if share.running and not self._rules.step_batch:
            return Decision(run=tuple(share.running))
        if share.running:
            self._make_way(share, now)
        return self._join(share, now) if share.running else self._begin(share, now)

    def room(self, now: float) -> Room:
        """Seats for the next batches (and in a running one, if that is open), and the key that still has
        room.
        """
        held = sum(pool.rows for pool in self._pools) + sum(one.rows for one in self._reservations)
        seats = max(0, self._rows_limit * len(self._serving) - held)
        open_key, room = self._open_batch()
        if open_key is not None:
            return Room(seats + room, announced_key(open_key), room)
        key = self._next_key(now)
        if key is None or seats == 0:
            return Room(seats, None, 0)
        room = min(seats, self._rows_limit - self._held_rows(key))
        return Room(seats, announced_key(key) if room > 0 else None, max(0, room))

    def counts(self) -> dict[str, int]:
        """Requests and rows waiting and running, batches and rows started, and `cut.<reason>` for each
        batch.
        """
        return {
            "waiting": sum(len(pool) for pool in self._pools),
            "waiting_rows": sum(pool.rows for pool in self._pools),
            "running": sum(len(share.running) for share in self._shares),
            "running_rows": sum(share.rows for share in self._shares),
            "reserved_rows": sum(one.rows for one in self._reservations),
            **self._counts,
        }

    # -- a new batch

    def _begin(self, share: Share, now: float) -> Decision:
        waits: list[float] = []
        for head in self._candidates(share, now):
            ready_at = self._ready_at(share, head, now)
            if ready_at <= now:
                return self._start(share, head)
            waits.append(ready_at)
        return Decision(wake_at=min(waits, default=None))

    def _candidates(self, share: Share, now: float) -> list[Entry]:
        """Heads of the keys that may begin, the best first; the second differs when it can fill a batch."""
        best = self._choose(share, now)
        if best is None:
            return []
        filler = share.oldest_filler(best.priority)
        return [best] if filler is None or filler.key == best.key else [best, filler]

    def _choose(self, share: Share, now: float) -> Entry | None:
        heads = [head for head in map(share.oldest, range(CLASSES)) if head is not None]
        if not heads:
            return None
        best = min(heads, key=lambda head: (self._aged_class(head, now), head.seq))
        if now - best.arrived > self._rules.age_bound_s:
            return best
        return share.oldest_filler(best.priority) or best

    def _aged_class(self, entry: Entry, now: float) -> int:
        return max(INTERACTIVE, entry.priority - int((now - entry.arrived) / self._rules.ageing_s))

    def _ready_at(self, share: Share, head: Entry, now: float) -> float:
        """When the key's batch may start: at once if full or urgent, else after the waits for company."""
        key = head.key
        if self._rules.step_batch or share.rows_of(key) >= self._rows_limit:
            return now
        held_until = max((one.made_at for one in self._announced(key)), default=now)
        if held_until + self._rules.reservation_hold_s > now and self._is_announced(key):
            return held_until + self._rules.reservation_hold_s
        if head.priority == INTERACTIVE:
            return now
        eldest = min(entry.arrived for entry in share.heads(key))
        quiet = share.last_arrival(key) + self._rules.admission_quiet_s
        return min(eldest + self._rules.admission_wait_s, quiet)

    def _start(self, share: Share, head: Entry) -> Decision:
        self._counts["batches"] += 1
        share.batch = f"{self._name}-{self._counts['batches']}"
        load = self._rules.capacity.load(())
        joined, cut = self._admit(share, head.key, load, first=head)
        self._counts[f"cut.{cut}"] += 1
        for entry in joined:
            entry.cut = cut
        return self._decision(share, joined)

    # -- a batch that runs, at a step border

    def _make_way(self, share: Share, now: float) -> None:
        """Park rows of a lower class when a higher one waits and can start nowhere otherwise."""
        best = next((head for head in map(share.oldest, range(CLASSES)) if head is not None), None)
        if best is None or (best.replica is None and self._is_for_another(share, best.key)):
            return
        lower = [entry for entry in share.running if self._aged_class(entry, now) > best.priority]
        same_key = best.key == share.key
        if not same_key and len(lower) < len(share.running):
            return
        for entry in sorted(lower, key=lambda one: (-one.priority, -one.seq)):
            if same_key and self._rules.capacity.load(share.running).refusal(best) is None:
                break
            self._park(share, entry)

    def _park(self, share: Share, entry: Entry) -> None:
        share.running.remove(entry)
        entry.move(Status.PREEMPTED)
        share.parked.add(entry)
        self._counts["preempted"] += 1

    def _join(self, share: Share, now: float) -> Decision:
        key = share.running[0].key
        load = self._rules.capacity.load(share.running)
        if load.full or self._others_are_due(share, key, now):
            return self._decision(share, [])
        joined, _ = self._admit(share, key, load, first=None)
        return self._decision(share, joined)

    def _is_for_another(self, share: Share, key: str) -> bool:
        """Whether a less loaded replica takes the next request of this key: an idle one, or one that runs fewer
        rows of it.
        """
        for other in self._serving:
            if other is share:
                continue
            if not other.running:
                return True
            full = self._rules.capacity.load(other.running).full
            if other.key == key and other.rows < share.rows and not full:
                return True
        return False

    def _others_are_due(self, share: Share, key: str, now: float) -> bool:
        """True when another key waited beyond the bound: then nobody joins, and the batch drains."""
        heads = map(share.oldest, range(CLASSES))
        return any(
            head and head.key != key and now - head.arrived > self._rules.age_bound_s for head in heads
        )

    # -- both

    def _admit(self, share: Share, key: str, load: Load, first: Entry | None) -> tuple[list[Entry], str]:
        """Move entries of a key into the batch; returns them and why no more came."""
        refused: list[str] = []
        parked_only = first is None and self._is_for_another(share, key)
        if first is not None:
            load.add(first)
            share.discard(first)

        def accept(entry: Entry) -> bool:
            if (refused and refused[-1] == "owed") or (parked_only and entry.replica is None):
                return False
            reason = load.refusal(entry)
            if reason is None:
                load.add(entry)
                return True
            if not load.full:
                entry.passed_over += 1
            refused.append("owed" if entry.passed_over > self._rules.pass_limit else reason)
            return False

        taken = [] if load.full else share.take(key, accept, _WINDOW_PER_ROW * self._rows_limit)
        joined = ([first] if first is not None else []) + taken
        for entry in joined:
            entry.move(Status.RUNNING)
            entry.replica = self._shares.index(share)
        share.running.extend(joined)
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

    def _decision(self, share: Share, admitted: list[Entry]) -> Decision:
        size = share.rows
        for entry in share.running:
            entry.batch_id = share.batch if entry in admitted else entry.batch_id
            entry.batch_size = max(entry.batch_size, size)
        return Decision(tuple(share.running), 1 if self._rules.step_batch else None)

    def _take_out(self, entry: Entry) -> None:
        if not self._backlog.discard(entry):
            assert entry.replica is not None, f"{entry.id} is nowhere"
            share = self._shares[entry.replica]
            if not share.parked.discard(entry):
                share.running.remove(entry)

    def _open_batch(self) -> tuple[str | None, int]:
        """The running batch with the most room for what is on its way: its key and rows."""
        best: tuple[str | None, int] = (None, 0)
        for share in self._serving if self._rules.step_batch else []:
            if share.key is not None and not any(entry.suspect for entry in share.running):
                room = self._rows_limit - share.rows - self._held_rows(share.key)
                best = max(best, (share.key, room), key=lambda found: found[1])
        return best

    def _is_announced(self, key: str) -> bool:
        return any(True for _ in self._announced(key))

    def _announced(self, key: str) -> Iterator[Announced]:
        """What is on its way and may be of this key: the sizes of its inputs are not known yet."""
        known = announced_key(key)
        return (one for one in self._reservations if one.key == known)

    def _held_rows(self, key: str) -> int:
        waiting = sum(pool.rows_of(key) for pool in self._pools)
        return waiting + sum(one.rows for one in self._announced(key))

    def _next_key(self, now: float) -> str | None:
        heads = [head for share in self._serving[:1] if (head := self._choose(share, now)) is not None]
        if heads:
            return heads[0].key
        return self._reservations[0].key if self._reservations else None
