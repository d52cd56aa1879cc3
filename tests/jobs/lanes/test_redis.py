"""Claims about crashes, time and memory, against a real server."""

from __future__ import annotations

import subprocess
import sys

import pytest
import redis
from saggar.jobs.lanes import Lanes, LaneSettings, LaneStore, celery_message
from saggar.jobs.lanes.store import Outcome

from tests.jobs.lanes.invariants import snapshot
from tests.support.wait import until

pytestmark = pytest.mark.e2e
LANE = "gen.m"


@pytest.fixture
def store(redis_url):
    client = redis.Redis.from_url(redis_url)
    yield LaneStore(client, "p:")
    client.close()


def put(store, *ids, key="k"):
    for id_ in ids:
        store.put(celery_message("t", id_, LANE, priority_class=2, batch_key=key, rows=1))


def server_us(store):
    seconds, micros = store.client.time()
    return seconds * 1_000_000 + micros


def test_times_are_whole_microseconds_of_the_server(store):
    before = server_us(store)
    put(store, "a")
    at = int(snapshot(store, LANE).records["a"]["at"])
    assert before <= at <= server_us(store)
    assert store.client.zscore("p:gen.m:a:2", "a") == at


def test_all_scripts_on_a_real_server(store):
    put(store, *"abcdef")
    batch = store.fetch(LANE, "w", rows=3, seats=3, token="t")
    assert store.fetch(LANE, "w", rows=3, seats=3, token="t") == batch
    a, b, c = (delivery.tag for delivery in batch.deliveries)
    assert store.ack(a) is Outcome.DONE
    assert store.requeue(b) is Outcome.DONE
    assert store.extend(LANE, "w", [b, c]) == [b]
    assert store.position(LANE, "f") == 3
    assert store.expedite(LANE, "f")
    assert store.sweep(LANE, "w") == (1, [])
    snapshot(store, LANE)
    assert store.purge(LANE, everything=True) == 5


HOLDER = """
import redis, sys
from saggar.jobs.lanes import Lanes
lanes = Lanes(redis.Redis.from_url(sys.argv[1]), "p:", heartbeat_s=0.2)
lanes.take("gen.m", 1)
print("holds", flush=True)
sys.stdin.read()
"""


def hold(url):
    """A process that holds one message and lives until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "holds\n"
    return process


def test_a_killed_process_is_found_long_before_its_lease_ends(store, redis_url):
    store.configure(LANE, LaneSettings(liveness_s=1.5, lease_s=600))
    put(store, "a")
    with hold(redis_url) as process:
        deadline = server_us(store) + 3_000_000
        while server_us(store) < deadline:  # longer than the liveness time: its heart beats
            assert store.sweep(LANE) == (0, [])
        process.kill()
    until(lambda: store.sweep(LANE)[0] == 1)
    assert store.fetch(LANE, "other", rows=1, seats=1).deliveries[0].tag.delivery == 2


def test_a_job_longer_than_its_lease_stays_where_it_is(store, redis_url):
    store.configure(LANE, LaneSettings(lease_s=0.6))
    put(store, "a")
    with hold(redis_url) as process:
        deadline = server_us(store) + 2_500_000
        while server_us(store) < deadline:
            store.sweep(LANE)
            assert store.fetch(LANE, "other", rows=1, seats=1) is None
        process.kill()
    until(lambda: store.sweep(LANE)[0] == 1)


def test_after_a_restart_no_lease_is_taken_before_a_full_lease(store, redis_server):
    store.configure(LANE, LaneSettings(lease_s=2, liveness_s=0.1))
    put(store, "a", "b")
    store.fetch(LANE, "w", rows=1, seats=1)
    store.sweep(LANE)
    store.client.config_set("appendfsync", "always")
    put(store, "c")
    redis_server.kill()
    redis_server.start()
    until(lambda: ping(store))
    assert store.size(LANE).leased == 1
    start = server_us(store)
    until(lambda: store.sweep(LANE)[0] == 1)
    assert server_us(store) - start >= 2_000_000
    snapshot(store, LANE)


def ping(store):
    try:
        return store.client.ping()
    except redis.ConnectionError:
        return False


def test_what_drains_a_lane_works_on_a_full_server(store):
    put(store, *"abcd")
    store.fetch(LANE, "w", rows=1, seats=1)
    used = store.client.info("memory")["used_memory"]
    store.client.config_set("maxmemory", used // 2)
    try:
        with pytest.raises(redis.ResponseError, match="maxmemory"):
            put(store, "refused")
        batch = store.fetch(LANE, "w", rows=2, seats=2)
        b, c = (delivery.tag for delivery in batch.deliveries)
        assert store.extend(LANE, "w", [b, c]) == []
        assert store.requeue(b) is Outcome.DONE
        assert store.ack(c) is Outcome.DONE
        assert store.sweep(LANE, "w") == (1, [])
    finally:
        store.client.config_set("maxmemory", 0)
    snapshot(store, LANE)


def test_many_processes_share_a_lane_without_doubles(store, redis_url):
    """Eight threads with their own lanes, all fetching: each message is handed out once."""
    from concurrent.futures import ThreadPoolExecutor

    put(store, *(str(i) for i in range(400)))

    def work(_):
        lanes = Lanes(redis.Redis.from_url(redis_url), "p:", urgent_seats=0)
        seen = []
        while batch := lanes.take(LANE, 8):
            for delivery in batch.deliveries:
                seen.append(delivery.tag.id)
                lanes.ack(str(delivery.tag))
        lanes.close()
        return seen

    with ThreadPoolExecutor(8) as pool:
        seen = [id_ for ids in pool.map(work, range(8)) for id_ in ids]
    assert sorted(seen, key=int) == [str(i) for i in range(400)]
    assert store.size(LANE).waiting == store.size(LANE).leased == 0


def test_a_message_of_a_job_takes_little_memory(store):
    """Ledger and message together may take 3 KB: the message's part is half of it at most."""
    before = store.client.info("memory")["used_memory_dataset"]
    for i in range(2000):
        job = f"0192f1d6-7b1c-7c31-b5a4-{i:012d}"
        key = '{"height":1024,"num_inference_steps":28,"task":"t2i","width":1024}'
        store.put(celery_message("saggar.generate", job, LANE, priority_class=2, batch_key=key, rows=1))
    assert (store.client.info("memory")["used_memory_dataset"] - before) / 2000 < 1200
