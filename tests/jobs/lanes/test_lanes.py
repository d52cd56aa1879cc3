"""What a process holds: appetite, seats, heartbeat, endings that wait for Redis, stopping."""

from __future__ import annotations

import threading

import fakeredis
import pytest
import redis
from saggar.jobs.lanes import Lanes, LaneSettings, LateAppetite, Tag, Want, celery_message
from saggar.jobs.lanes.message import inflate

LANE = "gen.m"


class Server:
    """A Redis that can be cut off."""

    def __init__(self):
        self.fake = fakeredis.FakeServer()

    def client(self):
        return fakeredis.FakeRedis(server=self.fake)

    def cut(self):
        self.fake.connected = False

    def heal(self):
        self.fake.connected = True


class Engine:
    """An appetite that wants what the test says, and remembers what it was told."""

    def __init__(self, want):
        self.wanted, self.got, self.left, self.free = want, [], [], []

    def want(self, lane, free):
        self.free.append(free)
        return self.wanted

    def fetched(self, lane, key, priority_class, rows):
        self.got.append(
            (lane, key, priority_class, {Tag.parse(tag).id: count for tag, count in rows.items()})
        )

    def gone(self, tag):
        self.left.append(Tag.parse(tag).id)


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def make(server):
    """Lanes without a running heart: tests beat themselves."""
    made = []

    def factory(appetite=None, **kwargs):
        made.append(Lanes(server.client(), appetite=appetite, heartbeat_s=3600, **kwargs))
        return made[-1]

    yield factory
    for lanes in made:
        lanes.close()


def put(lanes, *ids, c=2, key="k"):
    for id_ in ids:
        lanes.put(celery_message("t", id_, LANE, priority_class=c, batch_key=key, rows=1))


def tags(batch):
    return [str(delivery.tag) for delivery in batch.deliveries]


def test_the_appetite_decides_and_is_told(make):
    engine = Engine(Want(rows=2))
    lanes = make(engine)
    put(lanes, "a", "b", "c")
    batch = lanes.take(LANE, 8)
    assert engine.got == [(LANE, "k", 2, {"a": 1, "b": 1})]
    assert lanes.in_hand() == lanes.in_hand(LANE) == 2
    assert lanes.in_hand("gen.other") == 0
    lanes.ack(tags(batch)[0])
    lanes.requeue(tags(batch)[1])
    assert engine.left == ["a", "b"]
    assert lanes.in_hand() == 0
    engine.wanted = Want(rows=0)
    assert lanes.take(LANE, 8) is None


def test_prefetch_counts_what_the_process_holds(make):
    engine = Engine(Want(rows=8))
    lanes = make(engine, urgent_seats=0)
    put(lanes, *"abcdef")
    assert len(lanes.take(LANE, 4).deliveries) == 4
    assert lanes.take(LANE, 4) is None
    assert engine.free == [4, 0]
    assert len(lanes.take(LANE, 0).deliveries) == 2  # no limit


def test_two_seats_are_kept_for_interactive_messages(make):
    lanes = make(Engine(Want(rows=8)), urgent_seats=2)
    put(lanes, *"abcdefgh")
    assert len(lanes.take(LANE, 6).deliveries) == 4
    assert lanes.take(LANE, 6) is None
    put(lanes, "me", c=0)
    assert [Tag.parse(tag).id for tag in tags(lanes.take(LANE, 6))] == ["me"]


def test_a_full_engine_may_still_take_urgent_rows(make):
    lanes = make(Engine(Want(rows=0, urgent=1)))
    put(lanes, "a")
    assert lanes.take(LANE, 8) is None
    put(lanes, "me", "you", c=0)
    assert [Tag.parse(tag).id for tag in tags(lanes.take(LANE, 8))] == ["me"]


def test_the_open_group_is_filled_without_beginning_a_batch(make):
    lanes = make(Engine(Want(rows=0, open_key="k", room=2, urgent=1)))
    put(lanes, "other", key="other")
    assert lanes.take(LANE, 8) is None
    put(lanes, *"abc")
    put(lanes, "me", c=0, key="other")
    taken = [[Tag.parse(tag).id for tag in tags(lanes.take(LANE, 8))] for _ in range(2)]
    assert taken == [["me"], ["a", "b"]]


def test_few_seats_are_not_spared(make):
    lanes = make(Engine(Want(rows=8)), urgent_seats=2)
    put(lanes, "a")
    assert lanes.take(LANE, 1)


def test_an_appetite_filled_in_late_wants_nothing_before(make):
    late = LateAppetite()
    lanes = make(late)
    put(lanes, "a")
    assert lanes.take(LANE, 8) is None
    engine = Engine(Want(rows=1))
    late.fill(engine)
    lanes.ack(tags(lanes.take(LANE, 8))[0])
    assert (engine.got[0][3], engine.left) == ({"a": 1}, ["a"])


def test_an_ending_that_redis_did_not_hear_waits_for_the_heartbeat(make, server):
    engine = Engine(Want(rows=8))
    lanes = make(engine)
    put(lanes, "a", "b")
    a, b = tags(lanes.take(LANE, 8))
    server.cut()
    lanes.ack(a)
    lanes.requeue(b, counted=False)
    assert engine.left == ["a", "b"]  # their seats are free whatever Redis does
    with pytest.raises(redis.ConnectionError):
        lanes.beat()
    server.heal()
    assert lanes.store.size(LANE).leased == 2
    lanes.beat()
    size = lanes.store.size(LANE)
    assert (size.waiting, size.leased) == (1, 0)
    lanes.beat()  # nothing is told twice
    assert lanes.store.size(LANE) == size


def test_the_heartbeat_keeps_what_a_task_has_taken_up_and_gives_back_what_none_has(make):
    lanes = make()
    lanes.start_s = 0.0
    lanes.store.configure(LANE, LaneSettings(lease_s=1000))
    put(lanes, "a", "b")
    a, b = tags(lanes.take(LANE, 8))
    assert lanes.started(a)
    lanes.store.client.zadd(f"{LANE}:l", {"a": 1})
    lanes.beat()
    assert lanes.sweep(LANE) == 0, "it has a new lease"
    assert lanes.store.position(LANE, "b") == 0
    assert lanes.in_hand() == 1, "its seat is free"
    assert not lanes.started(b), "too late"


def test_a_task_that_comes_while_its_message_goes_back_is_told_so(make, monkeypatch):
    lanes = make()
    lanes.start_s = 0.0
    put(lanes, "a")
    assert lanes.take(LANE, 8)
    began, requeue = [], lanes.requeue

    def late(tag):
        began.append(lanes.started(tag))
        requeue(tag)

    monkeypatch.setattr(lanes, "requeue", late)
    lanes.beat()
    assert began == [False]
    assert lanes.store.size(LANE).waiting == 1


def test_lost_leases_are_told_once_and_free_their_seats(make):
    engine = Engine(Want(rows=8))
    lanes = make(engine)
    lost = []
    lanes.on_lost(lost.append)
    put(lanes, "a")
    (tag,) = tags(lanes.take(LANE, 8))
    lanes.store.sweep(LANE, lanes.owner)
    other = make()
    other.take(LANE, 8)
    lanes.beat()
    lanes.beat()
    assert (lost, engine.left, lanes.in_hand()) == ([tag], ["a"], 0)
    lanes.ack(tag)  # its late ending is refused
    assert other.in_hand() == lanes.store.size(LANE).leased == 1


def test_what_ends_during_a_heartbeat_is_not_lost(make, monkeypatch):
    lanes = make()
    lost = []
    lanes.on_lost(lost.append)
    put(lanes, "a")
    (tag,) = tags(lanes.take(LANE, 8))
    extend = lanes.store.extend

    def ack_comes_first(*args):
        lanes.ack(tag)
        return extend(*args)

    monkeypatch.setattr(lanes.store, "extend", ack_comes_first)
    lanes.beat()
    assert lost == []


def test_give_back_returns_what_has_not_started_uncounted(make):
    engine = Engine(Want(rows=8))
    lanes = make(engine)
    lanes.store.configure(LANE, LaneSettings(max_deliveries=1))
    put(lanes, *"abc")
    a, b, _c = tags(lanes.take(LANE, 8))
    assert lanes.started(a)
    assert lanes.give_back() == 2
    assert not lanes.started(b)  # its task must not run any more
    assert engine.left == ["b", "c"]
    assert lanes.take(LANE, 8) is None  # it is stopping
    other = make()
    assert [Tag.parse(tag).id for tag in tags(other.take(LANE, 8))] == ["b", "c"]
    lanes.ack(a)
    assert lanes.in_hand() == 0


def test_a_fetch_under_way_when_stopping_is_given_back_too(make, monkeypatch):
    lanes = make()
    put(lanes, "a")
    fetch = lanes.store.fetch

    def stop_comes_first(*args, **kwargs):
        batch = fetch(*args, **kwargs)
        assert lanes.give_back() == 0
        return batch

    monkeypatch.setattr(lanes.store, "fetch", stop_comes_first)
    assert lanes.take(LANE, 8) is None
    assert (lanes.store.size(LANE).waiting, lanes.in_hand()) == (1, 0)


def test_give_back_does_not_wait_for_a_redis_that_is_gone(make, server):
    lanes = make()
    put(lanes, *"abc")
    lanes.take(LANE, 8)
    server.cut()
    assert lanes.give_back() == 0
    server.heal()
    lanes.beat()  # if there is still time, it says so
    assert lanes.store.size(LANE).waiting == 3


def test_dead_letters_are_told(make):
    lanes = make()
    dead = []
    lanes.on_dead(lambda lane, job_id: dead.append((lane, job_id)))
    lanes.store.configure(LANE, LaneSettings(max_deliveries=1, lease_s=0))
    put(lanes, "a", "b")
    lanes.requeue(tags(lanes.take(LANE, 1))[0])
    assert dead == [(LANE, "a")]
    lanes.take(LANE, 1)
    lanes.sweep(LANE)
    assert dead == [(LANE, "a"), (LANE, "b")]


def test_an_ending_wakes_whoever_waits_for_room(make):
    lanes = make()
    woken = threading.Event()
    lanes.add_waker(woken.set)
    put(lanes, "a")
    lanes.ack(tags(lanes.take(LANE, 8))[0])
    assert woken.is_set()
    woken.clear()
    lanes.remove_waker(woken.set)
    lanes.wake()
    assert not woken.is_set()


def test_the_heart_outlives_a_failing_hook_and_a_lost_server(server, caplog):
    lanes = Lanes(server.client(), heartbeat_s=0.01)
    beats = threading.Semaphore(0)

    def extend(*_):
        beats.release()
        raise RuntimeError("a hook's fault")

    lanes.store.extend = extend
    put(lanes, "a")
    lanes.take(LANE, 8)
    assert all(beats.acquire(timeout=10) for _ in range(3))
    lanes.close()
    assert "a hook's fault" in caplog.text


def test_retried_messages_keep_their_job_id_in_hooks(make):
    lanes = make()
    dead = []
    lanes.on_dead(lambda lane, job_id: dead.append(job_id))
    lanes.store.configure(LANE, LaneSettings(max_deliveries=1))
    put(lanes, "a")
    first = tags(lanes.take(LANE, 8))[0]
    put(lanes, "a")
    lanes.ack(first)
    lanes.requeue(tags(lanes.take(LANE, 8))[0])
    assert dead == ["a"]


def test_a_second_delivery_says_so():
    payload = inflate({"headers": {"id": "a"}}, Tag(LANE, "a", 2), 2, "k", 1)
    assert payload["headers"]["redelivered"]


def test_an_acknowledgement_that_fails_is_told_once_and_holds_up_no_fetch(make, caplog):
    lanes = make()
    lanes.add_waker(lambda: None)  # acknowledgements wait for a flush
    put(lanes, "a", "b")
    for tag in tags(lanes.take(LANE, 2)):
        lanes.ack(tag)
    holder = f"{LANE}:o:{lanes.owner}"
    lanes.store.client.delete(holder)
    lanes.store.client.set(holder, "no set")
    for _ in range(2):
        lanes.flush()
    assert caplog.text.count("the acknowledgement of a failed") == 1
    assert caplog.text.count("the acknowledgement of b failed") == 1
