"""Each operation of a lane, on its own, and each of them sent twice."""

from __future__ import annotations

import fakeredis
import pytest
from saggar.jobs.lanes import LANE_LIB, LaneSettings, LaneSize, LaneStore, Tag, celery_message
from saggar.jobs.lanes.store import Outcome

from tests.jobs.lanes.invariants import snapshot, text, texts

LANE = "gen.m"


@pytest.fixture(params=[True, False], ids=["text", "bytes"])
def store(request):
    return LaneStore(fakeredis.FakeRedis(decode_responses=request.param), "p:")


def put(store, id_, key="k", c=2, rows=1, eta_us=0):
    message = celery_message("t", id_, LANE, priority_class=c, batch_key=key, rows=rows, eta_us=eta_us)
    assert store.put(message)
    return message


def fetch(store, owner="w", rows=8, **kwargs):
    batch = store.fetch(LANE, owner, rows=rows, seats=kwargs.pop("seats", 64), **kwargs)
    snapshot(store, LANE)
    return batch


def ids(batch):
    return [d.tag.id for d in batch.deliveries] if batch else []


def test_a_message_goes_through(store):
    message = put(store, "a", rows=3)
    assert store.size(LANE) == LaneSize(1, 0, 0, 0)
    batch = fetch(store)
    assert (batch.key, batch.priority_class, batch.rows) == ("k", 2, 3)
    assert (batch.deliveries[0].tag, batch.deliveries[0].body) == (Tag(LANE, "a", 1), message.body)
    assert store.size(LANE) == LaneSize(0, 0, 1, 0)
    assert store.ack(Tag(LANE, "a", 1)) is Outcome.DONE
    assert store.size(LANE) == LaneSize(0, 0, 0, 0)
    assert fetch(store) is None


def test_a_put_sent_twice_is_one_message(store):
    message = put(store, "a")
    assert not store.put(message)
    assert len(ids(fetch(store))) == 1
    assert not store.put(message)  # also while it is leased
    assert fetch(store) is None


def test_a_retry_published_while_leased_is_kept_beside(store):
    put(store, "a")
    first = fetch(store)
    retry = put(store, "a")
    assert not store.put(retry)
    assert store.position(LANE, "a") == 0
    assert store.ack(first.deliveries[0].tag) is Outcome.DONE
    second = fetch(store)
    assert ids(second) == [f"a~{retry.uuid}"]
    third = put(store, "a")  # its own retry, while it is leased
    assert store.position(LANE, "a") == 0
    assert store.expedite(LANE, "a")
    store.ack(second.deliveries[0].tag)
    assert fetch(store).deliveries[0].body == third.body
    store.ack(Tag(LANE, "a", 1))
    assert store.client.hlen("p:gen.m:id") == store.client.hlen("p:gen.m:m") == 0


def test_a_fetch_sent_twice_gives_the_same_and_leases_no_more(store):
    for i in range(20):
        put(store, str(i))
    one = fetch(store, token="t")
    assert fetch(store, token="t") == one
    assert store.size(LANE).leased == 8
    store.ack(one.deliveries[0].tag)
    assert ids(fetch(store, token="t")) == ids(one)[1:]  # what is done in between is not handed out again
    assert ids(fetch(store, token="u")) == [str(i) for i in range(8, 16)]


def test_an_ack_sent_twice_finds_it_gone(store):
    put(store, "a")
    tag = fetch(store).deliveries[0].tag
    assert [store.ack(tag), store.ack(tag)] == [Outcome.DONE, Outcome.GONE]


def test_a_requeue_sent_twice_counts_once(store):
    put(store, "a")
    tag = fetch(store).deliveries[0].tag
    assert [store.requeue(tag, counted=False) for _ in range(2)] == [Outcome.DONE, Outcome.DONE]
    assert snapshot(store, LANE).records["a"]["free"] == "1"
    assert fetch(store).deliveries[0].tag == Tag(LANE, "a", 2)
    assert store.requeue(tag) is Outcome.STALE


def test_a_stale_tag_is_refused(store):
    put(store, "a")
    old = fetch(store).deliveries[0].tag
    store.sweep(LANE, "w")
    new = fetch(store, "v").deliveries[0].tag
    assert new.delivery == 2
    assert store.ack(old) is store.requeue(old) is Outcome.STALE
    assert store.extend(LANE, "w", [old]) == [old]
    assert store.extend(LANE, "v", [new]) == []
    assert store.ack(new) is Outcome.DONE


def test_requeue_returns_to_the_old_place(store):
    for id_ in "abc":
        put(store, id_)
    batch = fetch(store, rows=2)
    put(store, "d")
    for delivery in reversed(batch.deliveries):
        store.requeue(delivery.tag)
    assert ids(fetch(store)) == ["a", "b", "c", "d"]


def test_requeue_may_put_aside(store):
    put(store, "a")
    tag = fetch(store).deliveries[0].tag
    assert store.requeue(tag, due_us=2**51) is Outcome.DONE
    assert fetch(store) is None
    assert store.size(LANE) == LaneSize(0, 1, 0, 0)


def test_a_lease_that_ran_out_may_be_acknowledged_or_taken_up_again(store):
    store.configure(LANE, LaneSettings(lease_s=0))
    for id_ in "ab":
        put(store, id_)
    a, b = (delivery.tag for delivery in fetch(store).deliveries)
    assert store.sweep(LANE) == (2, [])
    assert store.ack(a) is Outcome.DONE
    assert store.extend(LANE, "v", [b]) == [b]  # not somebody else
    assert store.extend(LANE, "w", [b]) == []
    assert store.size(LANE) == LaneSize(0, 0, 1, 0)
    snapshot(store, LANE)


def test_a_heartbeat_under_way_does_not_take_back_what_was_returned(store):
    put(store, "a")
    tag = fetch(store).deliveries[0].tag
    store.requeue(tag)
    assert store.extend(LANE, "w", [tag]) == [tag]
    assert ids(fetch(store, "v")) == ["a"]


def test_what_was_given_back_cannot_be_acknowledged(store):
    """A task that finds its message gone ends, and Celery acknowledges: the message must stay."""
    put(store, "a")
    tag = fetch(store).deliveries[0].tag
    store.requeue(tag, counted=False)
    assert store.ack(tag) is Outcome.STALE
    tag = fetch(store).deliveries[0].tag
    store.sweep(LANE, "w")
    store.requeue(tag, counted=False)  # after its lease ran out, too
    assert store.ack(tag) is Outcome.STALE
    assert ids(fetch(store)) == ["a"]


def test_deliveries_are_limited_and_returns_by_a_stop_are_free(store):
    store.configure(LANE, LaneSettings(max_deliveries=3))
    put(store, "a")
    for _ in range(10):
        assert store.requeue(fetch(store).deliveries[0].tag, counted=False) is Outcome.DONE
    outcomes = [store.requeue(fetch(store).deliveries[0].tag) for _ in range(3)]
    assert outcomes == [Outcome.DONE, Outcome.DONE, Outcome.DEAD]
    assert fetch(store) is None
    (letter,) = store.dead_letters(LANE)
    assert (letter.tag, letter.deliveries) == ("a", 13)
    assert store.revive(LANE, "a")
    assert not store.revive(LANE, "a")
    assert [store.requeue(fetch(store).deliveries[0].tag) for _ in range(3)][-1] is Outcome.DEAD
    assert store.drop_dead(LANE, "a")
    assert store.size(LANE) == LaneSize(0, 0, 0, 0)


def test_a_lease_that_runs_out_too_often_is_a_dead_letter_until_it_is_acknowledged(store):
    store.configure(LANE, LaneSettings(max_deliveries=2, lease_s=0))
    put(store, "a")
    fetch(store)
    assert store.sweep(LANE) == (1, [])
    tag = fetch(store).deliveries[0].tag
    assert store.sweep(LANE) == (0, ["a"])
    assert store.size(LANE) == LaneSize(0, 0, 0, 1)
    assert store.ack(tag) is Outcome.DONE
    assert store.size(LANE) == LaneSize(0, 0, 0, 0)


def test_not_before_waits_aside(store):
    put(store, "late", eta_us=2**51)
    put(store, "past", eta_us=1)
    assert store.size(LANE) == LaneSize(1, 1, 0, 0)
    assert store.position(LANE, "late") is None
    assert ids(fetch(store)) == ["past"]
    store.client.zadd("p:gen.m:d", {"late": 1})  # its time comes
    assert ids(fetch(store)) == ["late"]


def test_expedite_moves_to_the_head(store):
    for i in range(5):
        put(store, f"i{i}", c=0)
    put(store, "late", key="q", eta_us=2**51)
    put(store, "bulk", key="q")
    assert store.position(LANE, "bulk") == 5
    assert store.expedite(LANE, "bulk")
    assert store.position(LANE, "bulk") == 0
    assert store.expedite(LANE, "late")
    assert ids(fetch(store)) == ["bulk", "late"]
    assert not store.expedite(LANE, "bulk")  # leased
    assert not store.expedite(LANE, "nobody")


def test_position_counts_classes_and_age(store):
    put(store, "b0")
    put(store, "n0", c=1)
    put(store, "b1", key="other")
    put(store, "i0", c=0)
    assert [store.position(LANE, id_) for id_ in ("i0", "n0", "b0", "b1", "x")] == [0, 1, 2, 3, None]
    fetch(store)
    assert [store.position(LANE, id_) for id_ in ("i0", "n0", "b1")] == [None, 0, 2]


@pytest.mark.parametrize("everything", [False, True])
def test_purge_leaves_nothing_behind(store, everything):
    store.configure(LANE, LaneSettings(max_deliveries=1))
    for i in range(30):
        put(store, f"{i}", key=f"k{i % 3}", c=i % 2)
    put(store, "late", eta_us=2**51)
    leased = fetch(store, rows=3)
    store.requeue(leased.deliveries[0].tag)  # dead at once
    retry = put(store, leased.deliveries[1].tag.id)
    assert f"{leased.deliveries[1].tag.id}~{retry.uuid}" in snapshot(store, LANE).waiting
    assert store.purge(LANE, everything=everything) == (32 if everything else 29)
    left = snapshot(store, LANE)
    assert (len(left.leased), len(left.dead)) == ((0, 0) if everything else (2, 1))
    assert not everything or [store.ack(d.tag) for d in leased.deliveries[1:]] == [Outcome.GONE] * 2
    if not everything:
        assert store.extend(LANE, "w", [d.tag for d in leased.deliveries[1:]]) == []
        assert [store.ack(d.tag) for d in leased.deliveries[1:]] == [Outcome.DONE] * 2
        assert store.drop_dead(LANE, leased.deliveries[0].tag.id)
    rest = {key.removeprefix("p:gen.m:")[0] for key in texts(store.client.keys("*")) if ":t:" not in key}
    assert rest <= {"c", "h", "p", "s"}  # settings, hunger, processes, the sweeper's memory
    assert fetch(store) is None


def test_purge_is_done_in_parts(store):
    for i in range(2100):
        put(store, str(i))
    assert store.purge(LANE) == 2100


def test_settings_change_one_by_one_and_at_once(store):
    for i in range(4):
        put(store, f"a{i}", key="a")
    store.configure(LANE, LaneSettings(max_batch=4))
    store.configure(LANE, LaneSettings(age_bound_s=1.5))
    cfg = {text(name): text(value) for name, value in store.client.hgetall("p:gen.m:cfg").items()}
    assert cfg == {"max_batch": "4", "age_bound": "1500000"}
    snapshot(store, LANE)  # checks which keys are full


def test_keys_are_looked_through_only_when_the_batch_size_changes(store):
    put(store, "a", key="a")
    store.configure(LANE, LaneSettings(max_batch=8, age_bound_s=1.0))
    store.client.zadd("p:gen.m:f:2", {"a": 1})  # what settling would take away
    store.configure(LANE, LaneSettings(max_batch=8, age_bound_s=2.0))
    assert store.client.zscore("p:gen.m:f:2", "a") == 1
    store.configure(LANE, LaneSettings(max_batch=2))
    assert store.client.zscore("p:gen.m:f:2", "a") is None
    store.configure(LANE, LaneSettings(max_batch=1))
    assert store.client.zscore("p:gen.m:f:2", "a") > 1


def test_the_bell_rings_only_for_the_hungry(store):
    bell = store.client.pubsub()
    bell.subscribe(store.bell(LANE))

    def rung():
        messages = iter(lambda: bell.get_message(timeout=0), None)
        return sum(message["type"] == "message" for message in messages)

    rung()
    put(store, "a")
    assert rung() == 0
    fetch(store)
    put(store, "b")
    assert rung() == 0  # nobody has looked in vain
    fetch(store)
    assert fetch(store) is None
    put(store, "c")
    put(store, "d")
    assert rung() == 1
    assert fetch(store, lowest_class=0) is None
    put(store, "e")
    assert rung() == 0  # who looked for interactive messages only does not want it
    put(store, "i", c=0)
    assert rung() == 1


def test_a_dead_process_is_found_by_its_silence(store):
    put(store, "a")
    fetch(store)
    store.sweep(LANE)
    assert store.size(LANE).leased == 1
    store.configure(LANE, LaneSettings(liveness_s=0))
    assert store.sweep(LANE) == (1, [])
    assert ids(fetch(store)) == ["a"]


def test_nothing_is_taken_after_a_time_without_sweeps(store):
    """A frozen server, or none: the processes have not had the chance to be heard."""
    put(store, "a")
    fetch(store)
    store.sweep(LANE)
    store.configure(LANE, LaneSettings(liveness_s=30, lease_s=0))
    store.client.zadd("p:gen.m:l", {"a": 1})
    store.client.zadd("p:gen.m:p", {"w": 1})
    store.client.hincrby("p:gen.m:s", "at", -6_000_000)
    assert [store.sweep(LANE) for _ in range(3)] == [(0, [])] * 3
    store.client.hset("p:gen.m:s", "hold", 0)  # the time is over
    assert store.sweep(LANE) == (1, [])


def test_a_script_of_others_may_put(store):
    """The ledger writes record and message in one step."""
    message = celery_message("t", "a", LANE, priority_class=2, batch_key="k", rows=1)
    lua = LANE_LIB + "redis.call('SET', KEYS[1], 'x') return lane_put(ARGV[1], unpack(ARGV, 2))"
    assert store.client.eval(lua, 1, "record", store.base(LANE), *message.args()) == 1
    assert ids(fetch(store)) == ["a"]


def test_a_dead_letter_is_found_only_when_there_is_nothing_else(store):
    """The ledger asks for the message of a job, and drops its dead letters."""
    ask = LANE_LIB + "return {lane.find(ARGV[1], 'j') or '', lane_drop_dead(ARGV[1], ARGV[2])}"

    def found(drop="nobody"):
        tag, dropped = store.client.eval(ask, 0, store.base(LANE), drop)
        return text(tag), dropped

    store.configure(LANE, LaneSettings(max_deliveries=1))
    put(store, "j")
    store.requeue(fetch(store).deliveries[0].tag)
    assert found() == ("j", 0)
    other = f"j~{put(store, 'j').uuid}"
    assert found() == (other, 0)
    store.requeue(fetch(store).deliveries[0].tag)  # dead too
    assert [letter.tag for letter in store.dead_letters(LANE)] == ["j", other]
    assert found("j") == ("j", 2)
    assert found() == ("", 0)
    assert snapshot(store, LANE).records == {}
