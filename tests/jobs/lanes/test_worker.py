"""Real Celery workers over real lanes: what Celery's users expect, and what crashes must not break."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import redis
from saggar.jobs.lanes import LaneSettings, LaneStore, celery_message

from tests.jobs.lanes.invariants import snapshot
from tests.support.wait import until

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[3]
LANE = "gen.m"


class Farm:
    """Workers of one test, and the lane they share."""

    def __init__(self, url, folder):
        self.env = os.environ | {"TEST_REDIS_URL": url, "TEST_FOLDER": str(folder), "PYTHONPATH": str(ROOT)}
        self.folder = folder
        self.client = redis.Redis.from_url(url, decode_responses=True)
        self.store = LaneStore(self.client, "p:")
        self.store.configure(LANE, LaneSettings(liveness_s=1.5, lease_s=3, max_batch=4))
        self.workers = []

    def start(self, seats=4, queues=f"{LANE},chores"):
        log = (self.folder / f"worker{len(self.workers)}.log").open("w")
        name = f"w{len(self.workers)}@test"
        command = [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "tests.jobs.lanes.worker_app",
            "worker",
            "-P",
            "threads",
        ]
        options = ["-c", str(seats), "-Q", queues, "-n", name, "--without-gossip", "--without-mingle"]
        worker = subprocess.Popen(
            [*command, *options, "-l", "INFO"], env=self.env, cwd=ROOT, stdout=log, stderr=log
        )
        self.workers.append(worker)
        until(lambda: str(worker.pid) in self.client.lrange("ready", 0, -1), 60)
        return worker

    def put(self, *ids, c=2, headers=None):
        for id_ in ids:
            message = celery_message(
                "run", id_, LANE, priority_class=c, batch_key="k", rows=1, headers=headers
            )
            self.store.put(message)

    def take(self, seconds):
        """How long each job works, from now on."""
        (self.folder / "seconds.new").write_text(str(seconds))
        (self.folder / "seconds.new").rename(self.folder / "seconds")

    def order(self):
        log = self.folder / "runs"
        return log.read_text().split() if log.exists() else []

    def runs(self):
        return Counter(self.order())

    def idle(self):
        size = self.store.size(LANE)
        return size.waiting == size.leased == size.delayed == 0

    def log(self, number):
        return (self.folder / f"worker{number}.log").read_text()

    def close(self):
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self.client.close()


@pytest.fixture
def farm(redis_url, tmp_path):
    farm = Farm(redis_url, tmp_path)
    yield farm
    farm.close()


@pytest.fixture
def app(redis_url, monkeypatch):
    """The application in this process, as a producer; imported anew for the URL of this test."""
    monkeypatch.setenv("TEST_REDIS_URL", redis_url)
    sys.modules.pop("tests.jobs.lanes.worker_app", None)
    from tests.jobs.lanes import worker_app

    yield worker_app
    worker_app.app.close()


def test_what_celery_users_expect(farm, app):
    """Results, links, chains, groups, chords, retries, countdowns, other queues, remote control: one worker."""
    from celery import chain, chord, group
    from celery.result import AsyncResult

    farm.start()
    farm.put("minimal")
    assert AsyncResult("minimal", app=app.app).get(timeout=20) == "minimal"
    assert app.run.delay("sent").get(timeout=20) == "sent"
    assert app.join.delay("a", "b").get(timeout=20) == "a+b"  # a plain queue of kombu's
    assert chain(app.run.s("x"), app.join.s(2), app.run.s())().get(timeout=20) == "x+2"
    assert group(app.run.s(f"{i}") for i in range(9))().get(timeout=20) == [f"{i}" for i in range(9)]
    assert chord([app.run.s("y"), app.run.s("z")], app.gather.s())().get(timeout=20) == "y+z"
    linked = app.run.apply_async(("l",), link=app.join.s("link"))
    assert linked.get(timeout=20) == "l"
    until(lambda: linked.children)
    assert linked.children[0].get(timeout=20) == "l+link"
    assert app.flaky.delay("f").get(timeout=20) == 2
    assert app.run.apply_async(("late",), countdown=0.5).get(timeout=20) == "late"
    until(farm.idle)
    assert set(farm.runs().values()) == {1}
    assert farm.client.hlen("p:gen.m:m") == farm.client.hlen("p:gen.m:id") == 0
    (stats,) = app.app.control.inspect(timeout=5).stats().values()
    assert stats["broker"]["transport"] == "saggar"


def test_links_of_a_minimal_message(farm, app):
    from celery.result import AsyncResult

    farm.start()
    callback = app.join.s("after").set(task_id="callback")
    message = celery_message(
        "run", "m", LANE, priority_class=2, batch_key="k", rows=1, embed={"callbacks": [dict(callback)]}
    )
    farm.store.put(message)
    assert AsyncResult("callback", app=app.app).get(timeout=20) == "m+after"


def test_a_killed_workers_jobs_run_elsewhere(farm):
    farm.take(600)
    victim = farm.start()
    farm.put(*(f"j{i}" for i in range(8)))
    until(lambda: len(farm.runs()) == 4)
    farm.take(0.01)
    farm.start()
    victim.kill()
    until(farm.idle)
    assert farm.runs() == {f"j{i}": 2 if i < 4 else 1 for i in range(8)}


def test_a_worker_fed_while_frozen_and_killed_loses_nothing(farm):
    frozen = farm.start()
    farm.put("first")
    until(farm.idle)
    frozen.send_signal(signal.SIGSTOP)
    farm.put(*(f"j{i}" for i in range(6)))
    frozen.kill()
    farm.start()
    until(farm.idle)
    assert farm.runs() == {"first": 1} | {f"j{i}": 1 for i in range(6)}


def test_a_job_longer_than_its_lease_runs_once(farm):
    farm.take(5)  # lease 3, liveness 1.5
    farm.start()
    farm.start()
    farm.put("long")
    until(lambda: farm.runs() and farm.idle())
    assert farm.runs() == {"long": 1}


def test_a_restart_of_redis_ends_no_worker_and_loses_nothing(farm, redis_server):
    farm.client.config_set("appendfsync", "always")
    worker = farm.start()
    farm.take(2)
    farm.put(*(f"j{i}" for i in range(8)))
    until(lambda: len(farm.runs()) == 4)
    redis_server.kill()
    redis_server.start()
    until(lambda: alive(farm.client))
    until(farm.idle, 60)
    assert worker.poll() is None
    assert farm.runs().keys() == {f"j{i}" for i in range(8)}
    assert set(farm.runs().values()) == {1}  # endings waited in the outbox, leases were held


def alive(client):
    try:
        return client.ping()
    except redis.ConnectionError:
        return False


def test_stopping_finishes_what_runs_and_leaves_the_rest(farm):
    """What runs is finished, the rest of the lane runs elsewhere, the worker ends well."""
    farm.take(3)
    first = farm.start()
    farm.put(*(f"j{i}" for i in range(10)))
    until(lambda: len(farm.runs()) == 4)
    second = farm.start()
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == 0
    until(farm.idle)
    assert second.poll() is None
    assert farm.runs() == {f"j{i}": 1 for i in range(10)}
    assert farm.store.size(LANE).dead == 0


def test_interactive_overtakes_the_backlog(farm):
    farm.take(0.3)
    farm.put(*(f"b{i}" for i in range(60)))
    farm.start()
    until(lambda: len(farm.runs()) >= 4)
    farm.put("me", c=0)
    before = len(farm.order())
    until(lambda: "me" in farm.runs())
    assert farm.order().index("me") <= before + 2 * 4


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_kills_of_workers_and_redis_lose_nothing(farm, redis_server, seed):
    """Every job runs at least once, however often its worker or the server was killed."""
    draw = random.Random(seed)
    farm.client.config_set("appendfsync", "always")
    farm.store.configure(LANE, LaneSettings(max_deliveries=100))
    farm.take(0.1)
    jobs = [f"j{i}" for i in range(400)]
    farm.put(*jobs, headers={"ignore_result": True})
    living = [farm.start() for _ in range(2)]
    for _ in range(10):
        time.sleep(draw.uniform(0.2, 1.0))  # the moment of the crash is the experiment
        if draw.random() < 0.25:
            redis_server.kill()
            redis_server.start()
            until(lambda: alive(farm.client))
            farm.client.config_set("appendfsync", "always")
        else:
            victim = living.pop(draw.randrange(2))
            victim.kill()
            living.append(farm.start())
    until(farm.idle, 120)
    assert farm.runs().keys() == set(jobs)
    snapshot(farm.store, LANE)
