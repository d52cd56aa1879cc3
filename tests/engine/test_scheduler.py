"""The scheduler alone, on a clock of its own: what runs together, in which order, and that nothing starves."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from saggar.engine.batch_key import with_sizes
from saggar.engine.request import BULK, INTERACTIVE, NORMAL, Request, Room
from saggar.engine.sched.backlog import Backlog
from saggar.engine.sched.base import Entry, Status
from saggar.engine.sched.capacity import Capacity
from saggar.engine.sched.policy import KeyedScheduler, Rules
from saggar.engine.sched.share import Share

from tests.engine.bench import bench

JOBS = st.lists(
    st.tuples(
        st.sampled_from("abcde"),
        st.integers(1, 10),
        st.sampled_from([INTERACTIVE, NORMAL, BULK]),
        st.integers(1, 5),
        st.integers(1, 40),
        st.integers(0, 3),
        st.booleans(),
    ),
    max_size=60,
)


@given(JOBS, st.booleans(), st.integers(1, 8), st.sampled_from([None, 50]), st.floats(0, 20))
@settings(max_examples=150, deadline=None)
def test_every_request_ends_exactly_once(
    jobs: list[tuple[str, int, int, int, int, int, bool]],
    step_batch: bool,
    max_rows: int,
    max_cost: int | None,
    age_bound: float,
) -> None:
    run = bench(
        max_rows, max_cost, step_batch=step_batch, age_bound_s=age_bound, ageing_s=30, admission_wait_s=0.5
    )
    for key, rows, priority, steps, cost, turns, cancel in jobs:
        entry = run.add(key, rows, priority, steps, cost)
        for _ in range(turns):
            run.turn()
        if cancel and not entry.status.ended:
            run.scheduler.leave(entry, Status.ABORTED)
    run.drain()
    assert all(entry.status in (Status.COMPLETED, Status.ABORTED) for entry in run.entries)
    assert all(run.left[entry.id] == 0 for entry in run.entries if entry.status is Status.COMPLETED)
    counts = run.scheduler.counts()
    assert (counts["waiting"], counts["waiting_rows"], counts["running_rows"]) == (0, 0, 0)
    cuts = sum(value for name, value in counts.items() if name.startswith("cut."))
    assert cuts == counts.get("batches", 0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "drop", "take"]), st.sampled_from("abc"), st.integers(1, 4)),
        max_size=80,
    )
)
@settings(max_examples=150, deadline=None)
def test_the_backlog_agrees_with_a_plain_list(operations: list[tuple[str, str, int]]) -> None:
    backlog, plain = Backlog(fill=4), []
    for seq, (what, key, number) in enumerate(operations):
        if what == "add":
            entry = Entry(
                Request(str(seq), "", num_outputs=number, priority=number % 3), key, seq, float(seq)
            )
            backlog.add(entry)
            plain.append(entry)
        elif what == "drop" and plain:
            gone = plain.pop(number % len(plain))
            assert backlog.discard(gone)
            assert not backlog.discard(gone)
            if number == 4:  # one that is parked comes back to its old place
                backlog.add(gone)
                plain.append(gone)
        elif what == "take":
            taken = Share(backlog, backlog).take(key, lambda entry: entry.rows > 1, window=3)
            asked = sorted((one for one in plain if one.key == key), key=lambda one: (one.priority, one.seq))[
                :3
            ]
            assert taken == [one for one in asked if one.rows > 1]
            plain = [one for one in plain if one not in taken]
        _agree(backlog, plain)


def _agree(backlog: Backlog, plain: list[Entry]) -> None:
    assert len(backlog) == len(plain)
    assert backlog.rows == sum(entry.rows for entry in plain)
    assert sorted(entry.seq for entry in backlog) == sorted(entry.seq for entry in plain)
    for priority in range(3):
        own = [entry for entry in plain if entry.priority == priority]
        assert backlog.oldest(priority) is min(own, key=lambda one: one.seq, default=None)
        full = [one for one in own if sum(other.rows for other in plain if other.key == one.key) >= 4]
        assert backlog.oldest_filler(priority) is min(full, key=lambda one: one.seq, default=None)


def test_batches_come_near_the_best_possible() -> None:
    run = bench(8)
    rng = random.Random(1)
    keys = [str(i % 50) for i in range(1000)]
    rng.shuffle(keys)
    for key in keys:
        run.add(key)
    run.drain()
    best = 1000 / (50 * -(-20 // 8))
    assert 1000 / len(run.batches) >= 0.95 * best


def test_a_key_that_waited_beyond_the_bound_goes_before_fuller_ones() -> None:
    run = bench(4, age_bound_s=10)
    lonely = run.add("lonely")
    for turn in range(30):
        for _ in range(4):
            run.add(f"busy{turn % 3}")
        run.turn()
    assert run.started[lonely.id] <= 10 + 2
    assert run.started[lonely.id] > 0


def test_an_unfitting_head_lets_others_pass_and_still_starts_within_the_bound() -> None:
    run = bench(4, step_batch=True, pass_limit=5, age_bound_s=1e9)
    run.add("k", rows=1, steps=10_000)
    run.turn()
    head = run.add("k", rows=4, steps=1)
    passed = 0
    for _ in range(40):
        small = run.add("k", rows=1, steps=2)
        run.turn()
        passed += small.id in run.started and head.id not in run.started
        if passed and small.id not in run.started:
            break
    assert 0 < passed <= 5 + 1
    assert head.passed_over >= 5
    run.scheduler.leave(run.entries[0], Status.ABORTED)
    run.drain()
    later = [entry for entry in run.entries[2:] if run.started[entry.id] > run.started[head.id]]
    assert later, "the smaller ones waited for the head"


def test_a_large_request_in_request_batch_is_passed_within_its_batch_only() -> None:
    run = bench(4)
    for rows in (3, 4, 1, 1):
        run.add("k", rows=rows)
    run.drain()
    assert run.batches == [["r0", "r2"], ["r1"], ["r3"]]


@pytest.mark.parametrize("step_batch", [True, False])
def test_interactive_goes_first_and_bulk_does_not_starve(step_batch: bool) -> None:
    run = bench(2, step_batch=step_batch, ageing_s=20, age_bound_s=1000)
    bulk = run.add("bulk", priority=BULK)
    for _ in range(100):
        run.add("now", priority=INTERACTIVE)
        run.add("now", priority=INTERACTIVE)
        run.turn()
    assert 30 <= run.started[bulk.id] <= 45


def test_preempted_rows_return_to_their_old_place() -> None:
    run = bench(2, step_batch=True)
    bulk = [run.add("bulk", steps=5) for _ in range(3)]
    run.turn()
    urgent = run.add("now", priority=INTERACTIVE)
    decision = run.turn()
    assert list(decision.run) == [urgent]
    assert [entry.status for entry in bulk] == [Status.PREEMPTED, Status.PREEMPTED, Status.WAITING]
    assert list(run.turn().run) == bulk[:2]


def test_another_key_that_is_due_closes_a_running_step_batch() -> None:
    run = bench(4, step_batch=True, age_bound_s=10)
    run.add("busy", steps=4)
    run.turn()
    other = run.add("other")
    for _ in range(60):
        run.add("busy", steps=4)
        run.turn()
    assert run.started[other.id] <= 10 + 6


def test_the_admission_wait_ends_by_a_full_batch_a_quiet_spell_or_its_deadline() -> None:
    rules: dict[str, Any] = {"admission_wait_s": 1.0, "admission_quiet_s": 0.25}
    run = bench(2, **rules)
    run.add("k")
    assert run.scheduler.schedule(0.0).wake_at == 0.25
    run.now = 0.2
    run.add("k")
    assert len(run.scheduler.schedule(0.2).run) == 2
    run = bench(16, **rules)
    for tenth in range(12):
        run.now = tenth / 10
        run.add("k")
        decision = run.scheduler.schedule(run.now)
        if decision.run:
            break
    assert run.now == 1.0
    run = bench(8, **rules)
    run.add("k", priority=INTERACTIVE)
    assert run.scheduler.schedule(0.0).run


def test_reservations_hold_a_batch_open_until_they_arrive_or_time_is_up() -> None:
    run = bench(4, reservation_hold_s=2.0)
    announced = run.scheduler.reserve("k", 2, now=0.0)
    run.add("k")
    assert run.scheduler.schedule(0.0).wake_at == 2.0
    run.scheduler.release(announced, 1)
    run.add("k")
    assert not run.scheduler.schedule(0.5).run
    run.scheduler.release(announced, 1)
    run.add("k")
    assert len(run.scheduler.schedule(0.6).run) == 3
    assert announced.closed
    run = bench(4, reservation_hold_s=2.0)
    run.scheduler.reserve("k", 2, now=0.0)
    run.add("k")
    decision = run.scheduler.schedule(2.0)
    assert len(decision.run) == 1
    assert decision.run[0].cut == "late"


def test_who_announces_does_not_know_the_sizes_of_inputs_yet() -> None:
    run = bench(4, reservation_hold_s=2.0)
    key = with_sizes("k", "image=8x8x3")
    announced = run.scheduler.reserve("k", 2, now=0.0)
    run.add(key)
    assert run.scheduler.schedule(0.0).wake_at == 2.0
    assert run.scheduler.room(0.0) == Room(seats=1, open_key="k", room=1)
    run.scheduler.release(announced, 1)
    run.add(key)
    run.scheduler.release(announced, 1)
    run.add(with_sizes("k", "image=9x9x3"))
    assert len(run.scheduler.schedule(0.5).run) == 2, "those of one size"


def test_a_held_batch_lets_a_full_one_of_another_key_begin() -> None:
    run = bench(2, reservation_hold_s=5.0)
    run.scheduler.reserve("held", 1, now=0.0)
    run.add("held")
    run.add("full")
    run.add("full")
    assert {entry.key for entry in run.scheduler.schedule(0.0).run} == {"full"}


def test_room_names_the_open_group_and_never_more_than_the_next_batch() -> None:
    run = bench(4)
    assert (run.scheduler.room(0).seats, run.scheduler.room(0).open_key) == (4, None)
    run.add("k", steps=3)
    room = run.scheduler.room(0)
    assert (room.seats, room.open_key, room.room) == (3, "k", 3)
    run.scheduler.schedule(0.0)
    assert run.scheduler.room(0).seats == 4
    run.scheduler.reserve("other", 3, 0.0)
    room = run.scheduler.room(0)
    assert (room.seats, room.open_key, room.room) == (1, "other", 1)
    run = bench(4, step_batch=True)
    run.add("k", rows=1, steps=9)
    run.scheduler.schedule(0.0)
    room = run.scheduler.room(0)
    assert (room.seats, room.open_key, room.room) == (4 + 3, "k", 3)


def test_states_change_only_along_the_drawing() -> None:
    entry = Entry(Request("a", ""), "k", 0, 0.0)
    with pytest.raises(AssertionError, match="waiting -> completed"):
        entry.move(Status.COMPLETED)
    entry.move(Status.RUNNING)
    entry.move(Status.PREEMPTED)
    with pytest.raises(AssertionError, match="preempted -> completed"):
        entry.move(Status.COMPLETED)
    entry.move(Status.RUNNING)
    entry.move(Status.COMPLETED)
    with pytest.raises(AssertionError, match="completed -> aborted"):
        entry.move(Status.ABORTED)


def test_the_work_of_a_decision_does_not_grow_with_what_waits() -> None:
    """Counted in calls of the backlog's inner functions, not in time."""
    calls = {}
    for waiting, keys in ((1_000, 5), (10_000, 50)):
        run = bench(8)
        for index in range(waiting):
            run.add(f"k{index % keys}")
        run.turn()
        inner, count = Backlog._valid, [0]

        def counted(self: Backlog, item: Any, inner: Any = inner, count: list[int] = count) -> bool:
            count[0] += 1
            return bool(inner(self, item))

        Backlog._valid = counted  # type: ignore[method-assign]
        try:
            for _ in range(20):
                run.turn()
        finally:
            Backlog._valid = inner  # type: ignore[method-assign]
        calls[waiting] = count[0]
    assert calls[10_000] <= 1.2 * calls[1_000]


REPLICAS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.integers(1, 5),
        st.sampled_from([INTERACTIVE, NORMAL, BULK]),
        st.integers(1, 6),
        st.sampled_from(["turn", "cancel", "fail", "lose", "none"]),
        st.integers(0, 2),
    ),
    max_size=50,
)


@given(REPLICAS, st.booleans(), st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_replicas_share_one_backlog(
    jobs: list[tuple[str, int, int, int, str, int]], step_batch: bool, replicas: int
) -> None:
    """Each request runs in one place at a time, parked ones come back where they were, and all end."""
    scheduler = KeyedScheduler(Rules(Capacity(4), step_batch=step_batch, age_bound_s=5, replicas=replicas))
    left: dict[Entry, int] = {}
    serving = set(range(replicas))
    home: dict[Entry, int] = {}
    now = 0.0

    def turn(replica: int) -> None:
        nonlocal now
        now += 1
        run = list(scheduler.schedule(now, replica).run)
        assert len({entry.key for entry in run}) <= 1
        assert sum(entry.rows for entry in run) <= 4 or len(run) == 1
        for entry in run:
            assert home.setdefault(entry, replica) == replica
            left[entry] -= 1
            if left[entry] == 0:
                end(entry, Status.COMPLETED)

    def end(entry: Entry, status: Status) -> None:
        scheduler.leave(entry, status)
        del left[entry]
        home.pop(entry, None)

    def lose(replica: int) -> None:
        for entry in [entry for entry, at in home.items() if at == replica]:
            scheduler.put_back(entry)
            assert home.pop(entry) == replica
        scheduler.use(serving)

    for seq, (key, rows, priority, steps, what, number) in enumerate(jobs):
        entry = Entry(Request(f"r{seq}", "", num_outputs=rows, priority=priority), key, seq, now)
        left[entry] = steps
        scheduler.add(entry)
        replica = number % replicas
        if what == "cancel":
            end(list(left)[number % len(left)], Status.ABORTED)
        elif what == "fail":
            serving.discard(replica)
            lose(replica)
            assert scheduler.room(now).seats <= 8 * len(serving)
            serving.add(replica)
            scheduler.use(serving)
        elif what != "none":
            turn(replica)
    for _ in range(20_000):
        if not left:
            break
        for replica in range(replicas):
            turn(replica)
    counts = scheduler.counts()
    assert (len(left), counts["waiting"], counts["running"]) == (0, 0, 0)


def test_the_least_loaded_replica_takes_what_comes() -> None:
    scheduler = KeyedScheduler(Rules(Capacity(8), step_batch=True, replicas=2))
    entries = [Entry(Request(f"r{seq}", ""), "k", seq, 0.0) for seq in range(5)]
    scheduler.add(entries[0])
    assert list(scheduler.schedule(0.0, 0).run) == entries[:1]
    scheduler.add(entries[1])
    assert list(scheduler.schedule(0.0, 0).run) == entries[:1]  # the other one is idle
    assert list(scheduler.schedule(0.0, 1).run) == entries[1:2]
    scheduler.add(entries[2])
    assert list(scheduler.schedule(0.0, 0).run) == [entries[0], entries[2]]
    scheduler.add(entries[3])
    assert list(scheduler.schedule(0.0, 0).run) == [entries[0], entries[2]]  # the other one runs fewer
    assert list(scheduler.schedule(0.0, 1).run) == [entries[1], entries[3]]
    scheduler.use([0])
    scheduler.add(entries[4])
    assert entries[4] in scheduler.schedule(0.0, 0).run
