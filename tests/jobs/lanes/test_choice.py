"""Which messages a fetch picks: batches as full as the backlog allows, classes exact, nobody starves."""

from __future__ import annotations

import random
from collections import Counter

import fakeredis
import pytest
from saggar.jobs.lanes import LaneSettings, LaneStore, celery_message

LANE = "gen.m"


@pytest.fixture
def store():
    return LaneStore(fakeredis.FakeRedis())


def put(store, id_, key, c=2, rows=1):
    store.put(celery_message("t", id_, LANE, priority_class=c, batch_key=key, rows=rows))


def drain(store, rows=8, after_fetch=lambda: None):
    """All batches until the lane is empty, each done before the next."""
    batches = []
    while batch := store.fetch(LANE, "w", rows=rows, seats=64):
        batches.append(batch)
        for delivery in batch.deliveries:
            store.ack(delivery.tag)
        after_fetch()
    return batches


def best_mean(keys, size=8):
    """Of the batches that a full view of the backlog allows: each key in ceil(n / size)."""
    return len(keys) / sum(-(-n // size) for n in Counter(keys).values())


@pytest.mark.parametrize("seed", [1, 2])
def test_a_thousand_jobs_of_fifty_keys_run_in_full_batches(store, seed):
    draw = random.Random(seed)
    keys = [f"k{draw.randrange(50)}" for _ in range(1000)]
    for i, key in enumerate(keys):
        put(store, str(i), key)
    batches = drain(store)
    assert sum(batch.rows for batch in batches) == 1000
    assert 1000 / len(batches) >= 0.95 * best_mean(keys)


def test_64_jobs_of_three_keys_interleaved(store):
    keys = [f"k{i % 3}" for i in range(64)]
    for i, key in enumerate(keys):
        put(store, str(i), key)
    assert 64 / len(drain(store)) >= 0.95 * best_mean(keys)


def test_full_batches_also_while_jobs_arrive_and_the_oldest_are_overdue(store):
    """The age bound is judged when a batch begins, never inside one: that would be first come, first served."""
    store.configure(LANE, LaneSettings(age_bound_s=0))
    draw = random.Random(3)
    keys = [f"k{draw.randrange(20)}" for _ in range(800)]
    backlog = [(str(i), key) for i, key in enumerate(keys)]

    def arrive(count=8):
        for id_, key in [backlog.pop(0) for _ in range(min(count, len(backlog)))]:
            put(store, id_, key)

    arrive(400)
    batches = drain(store, after_fetch=arrive)
    assert sum(batch.rows for batch in batches) == 800
    assert 800 / len(batches) >= 0.8 * best_mean(keys)


def test_the_open_group_comes_first_up_to_its_room(store):
    store.configure(LANE, LaneSettings(age_bound_s=0))
    put(store, "old", "a")
    for i in range(5):
        put(store, f"b{i}", "b")
    batch = store.fetch(LANE, "w", rows=16, seats=64, open_key="b", room=3)
    assert (batch.key, batch.rows) == ("b", 3)
    batch = store.fetch(LANE, "w", rows=16, seats=64, open_key="b", room=0)  # full: a new batch begins
    assert (batch.key, batch.rows) == ("a", 1)
    batch = store.fetch(LANE, "w", rows=16, seats=64, open_key="nobody", room=3)
    assert (batch.key, batch.rows) == ("b", 2)


def test_the_open_group_alone_when_no_batch_is_to_begin(store):
    put(store, "a", "a")
    put(store, "b", "b")
    assert store.fetch(LANE, "w", rows=0, seats=64, open_key="nobody", room=3) is None
    batch = store.fetch(LANE, "w", rows=0, seats=64, open_key="b", room=3)
    assert (batch.key, batch.rows) == ("b", 1)


def test_a_new_batch_takes_the_overdue_then_the_full_then_the_oldest(store):
    put(store, "a0", "a")
    for i in range(8):
        put(store, f"b{i}", "b")
    for i in range(9):
        put(store, f"c{i}", "c")
    fetched = [store.fetch(LANE, "w", rows=8, seats=64).key for _ in range(3)]
    assert fetched == ["b", "c", "a"]
    put(store, "d0", "d")
    for i in range(8):
        put(store, f"e{i}", "e")
    store.configure(LANE, LaneSettings(age_bound_s=0))
    assert [store.fetch(LANE, "w", rows=8, seats=64).key for _ in range(3)] == ["c", "d", "e"]


def test_rows_count_not_messages(store):
    for i, rows in enumerate([3, 3, 3, 20, 1]):
        put(store, str(i), "k", rows=rows)
    assert [batch.rows for batch in drain(store)] == [6, 3, 20, 1]
    for i in range(2):
        put(store, f"a{i}", "a", rows=1)
    for i in range(2):
        put(store, f"b{i}", "b", rows=4)
    assert [batch.key for batch in drain(store)] == ["b", "a"]  # four and four fill a batch


def test_seats_and_rows_limit_a_fetch(store):
    for i in range(30):
        put(store, str(i), "k")
    assert store.fetch(LANE, "w", rows=8, seats=3).rows == 3
    assert store.fetch(LANE, "w", rows=5, seats=64).rows == 5
    assert store.fetch(LANE, "w", rows=100, seats=64).rows == 8  # never more than a batch


def test_classes_are_exact_over_the_whole_backlog(store):
    draw = random.Random(4)
    waiting: Counter[int] = Counter()

    def arrive(count=3):
        for _ in range(count):
            c = draw.randrange(4)
            put(store, f"{sum(waiting.values())}:{draw.random()}", f"k{draw.randrange(5)}", c=c)
            waiting[c] += 1

    arrive(60)
    for _ in range(100):
        batch = store.fetch(LANE, "w", rows=8, seats=64)
        assert batch.priority_class == min(c for c, n in waiting.items() if n)
        waiting[batch.priority_class] -= len(batch.deliveries)
        arrive()


def test_interactive_is_next_behind_five_thousand(store):
    for i in range(5000):
        put(store, str(i), f"k{i % 7}")
    store.fetch(LANE, "w", rows=8, seats=64)  # runs
    store.fetch(LANE, "w", rows=8, seats=64)  # in hand, the next
    put(store, "me", "k3", c=0)
    assert store.position(LANE, "me") == 0
    batch = store.fetch(LANE, "w", rows=8, seats=64, open_key="k1", room=4)
    assert [delivery.tag.id for delivery in batch.deliveries] == ["me"]


def test_no_key_starves(store):
    """Overdue, a message starts at most as many batches later as older messages were waiting, plus one."""
    store.configure(LANE, LaneSettings(age_bound_s=0))
    draw = random.Random(5)
    allowed: dict[str, int] = {}
    for n in range(150):
        for j in range(8):  # one hot key fills every batch, cold keys trickle in
            hot = j or draw.random() < 0.7
            allowed[f"{n}.{j}"] = store.size(LANE).waiting + 1
            put(store, f"{n}.{j}", "hot" if hot else f"cold{draw.randrange(30)}")
        batch = store.fetch(LANE, "w", rows=8, seats=64)
        for id_ in [delivery.tag.id for delivery in batch.deliveries]:
            assert allowed.pop(id_) >= 0
        allowed = {id_: left - 1 for id_, left in allowed.items()}
        assert min(allowed.values(), default=0) >= 0


def test_without_the_bound_full_batches_would_go_first_for_ever(store):
    put(store, "cold", "cold")
    for n in range(20):
        for j in range(8):
            put(store, f"{n}.{j}", "hot")
        assert store.fetch(LANE, "w", rows=8, seats=64).key == "hot"
    store.configure(LANE, LaneSettings(age_bound_s=0))
    assert store.fetch(LANE, "w", rows=8, seats=64).key == "cold"
