"""Ends that were asked for: by signals, by the supervisor's watchdog, by an engine that is gone."""

from __future__ import annotations

import signal
import subprocess
import threading
import time

import psutil
import pytest
from saggar.workers.watchdog import Sight, Watchdog

from tests.support.cluster import until
from tests.support.site import LANE, Site, freeze

pytestmark = pytest.mark.e2e

SLOW = {"sleep_s": 0.25, "steps": 12}  # three seconds


def executing(site: Site) -> int:
    return sum(record.progress is not None for record in site.client.list(state="running").records)


def test_sigterm_finishes_what_runs_and_hands_the_rest_over_at_once(site: Site) -> None:
    ids = site.submit(24, params={**SLOW, "steps": 48})  # another worker is up before the first batch is over
    first = site.worker()
    until(lambda: executing(site) == 8, 60, "a full batch")
    until(lambda: site.lane.size(LANE).leased == 16, 30, "the next batch in hand")
    other = site.worker()
    site.serving(2)
    first.process.terminate()
    told = time.monotonic()
    until(lambda: sum(other.has(r) for r in site.client.list(state="running").records) >= 8)
    handed_over = time.monotonic() - told
    print(f"handed over after {handed_over:.2f} s")
    assert first.process.wait(30) == 0
    records = site.wait(ids)
    assert sum(other.has(record) for record in records) == 16
    assert {record.suspicions for record in records} == {0}
    assert handed_over < 3.0, handed_over  # a second, on a machine with nothing else to do
    site.check(records)
    site.nothing_is_left()


def test_what_a_stopping_worker_finishes_is_acknowledged(site: Site) -> None:
    """Or others would be given it again."""
    ids = site.submit(4, params=SLOW) + site.submit(4, first=4, params={**SLOW, "steps": 40})
    worker = site.worker()
    until(lambda: executing(site) == 8, 60)
    worker.process.terminate()
    until(lambda: site.client.counts()["succeeded"] == 4, 20, "the shorter ones")
    until(lambda: site.lane.size(LANE).leased == 4, 3, "their acknowledgement, at once")
    assert worker.process.wait(30) == 0
    assert {record.state for record in site.wait(ids, 1)} == {"succeeded"}
    size = site.lane.size(LANE)
    assert (size.waiting, size.leased, size.delayed) == (0, 0, 0), size
    site.nothing_is_left()


def test_a_job_longer_than_the_grace_time_is_given_back_and_no_suspect(site: Site) -> None:
    ids = site.submit(2, params={"sleep_s": 0.2, "steps": 40})
    first = site.worker("--grace", "1")
    until(lambda: executing(site) == 2, 60)
    first.process.terminate()
    first.process.wait(20)
    site.worker()
    records = site.wait(ids)
    assert {record.suspicions for record in records} == {0}
    site.check(records)
    site.nothing_is_left()


def test_with_redis_frozen_it_ends_by_its_own_deadline(site: Site) -> None:
    ids = site.submit(4, params=SLOW)
    worker = site.worker("--grace", "2")
    until(lambda: executing(site) == 4, 60)
    site.redis.send(signal.SIGSTOP)
    try:
        worker.process.terminate()
        began = time.monotonic()
        worker.process.wait(30)
        assert time.monotonic() - began < 15
    finally:
        site.redis.send(signal.SIGCONT)
    until(lambda: not site.processes(), 20, "the end of all its processes")
    site.worker()
    site.check(site.wait(ids))
    site.nothing_is_left()


def test_ctrl_c_twice_is_out_within_five_seconds_and_loses_nothing(site: Site) -> None:
    ids = site.submit(12, params={"sleep_s": 0.5, "steps": 60})
    worker = site.worker(executor="multiproc")
    until(lambda: executing(site) == 8, 60)
    assert site.ranks()
    began = time.monotonic()
    worker.process.send_signal(signal.SIGINT)
    until(lambda: "Warm shutdown" in worker.log.read_text() or worker.process.poll() is not None, 5)
    worker.process.send_signal(signal.SIGINT)
    worker.process.wait(10)
    until(lambda: not site.processes(), 10, "the end of worker and ranks")
    assert time.monotonic() - began < 5
    for job_id in ids:
        site.client.cancel(job_id)
    site.worker()
    assert {record.state for record in site.wait(ids)} == {"cancelled"}
    assert all(len(site.terminal(job_id)) == 1 for job_id in ids)
    site.nothing_is_left()


@pytest.mark.parametrize("victim", ["supervisor", "worker"])
def test_ranks_end_with_whoever_started_them(site: Site, victim: str) -> None:
    ids = site.submit(8, params=SLOW)
    worker = site.worker(executor="multiproc")
    until(lambda: executing(site) == 8, 60)
    (rank,) = site.ranks()
    target = psutil.Process(worker.process.pid) if victim == "supervisor" else worker.child()
    target.kill()
    psutil.wait_procs([rank], timeout=30)
    assert not rank.is_running()
    if victim == "supervisor":
        worker.process.wait(10)
        until(lambda: not site.processes(), 30, "the end of the orphans")
        site.worker()
        site.serving(1)
    records = site.wait(ids)
    site.check(records)
    site.nothing_is_left()


@pytest.mark.parametrize("busy", [True, False])
def test_a_rank_that_was_killed_is_started_anew(site: Site, busy: bool) -> None:
    worker = site.worker(executor="multiproc")
    site.serving(1)
    (rank,) = site.ranks()
    ids = site.submit(4, params={"sleep_s": 0.25, "steps": 40}) if busy else []
    if busy:
        until(lambda: executing(site) == 4, 60)
    rank.kill()
    until(lambda: [one for one in site.ranks() if one.pid != rank.pid], 30, "another rank")
    ids += site.submit(4, first=4)
    records = site.wait(ids)
    assert not any(record.dead for record in records)
    site.check(records)
    assert worker.process.poll() is None
    site.nothing_is_left()


def test_the_watchdog_starts_a_worker_anew_that_does_nothing_while_jobs_wait(site: Site) -> None:
    worker = site.worker(SAGGAR_WATCHDOG_S="3")
    site.serving(1)
    stuck = worker.child()
    freeze(stuck)
    records = site.wait(site.submit(4))
    assert not stuck.is_running() or stuck.status() == psutil.STATUS_ZOMBIE
    assert "killing it" in worker.log.read_text()
    site.check(records)
    site.nothing_is_left()


def test_the_watchdog_gives_up_after_too_many_restarts(site: Site) -> None:
    worker = site.worker(SAGGAR_MAX_RESTARTS="1")
    for _ in range(2):
        site.serving(1)
        child = worker.child()
        child.kill()
        psutil.wait_procs([child], timeout=10)
    assert worker.process.wait(30) == 128 + signal.SIGKILL
    assert "giving up" in worker.log.read_text()
    site.nothing_is_left()


def watchdog(site: Site, times: list[float]) -> Watchdog:
    return Watchdog(site.settings, "noop", 60, clock=lambda: times[-1])


def test_what_the_watchdog_calls_stuck(site: Site) -> None:
    times = [0.0]
    dog = watchdog(site, times)

    def look(at: float, sight: Sight) -> bool:
        times.append(at)
        return dog.stuck(sight)

    assert not look(0, Sight(work=False, sign=None))
    assert not look(100, Sight(work=True, sign=None)), "it has had no time to fetch"
    assert not look(159, Sight(work=True, sign=None))
    assert look(160, Sight(work=True, sign=None))
    assert not look(165, Sight(work=True, sign=7.0)), "it fetched"
    assert not look(224, Sight(work=True, sign=7.0))
    assert not look(225, Sight(work=True, sign=8.0)), "its heart beats over a long video"
    assert not look(300, Sight(work=False, sign=8.0)), "nothing waits"


def test_a_watchdog_ends_with_its_child(site: Site) -> None:
    child = subprocess.Popen(["sleep", "60"])
    over = threading.Event()
    thread = threading.Thread(target=Watchdog(site.settings, "noop", 0.5).watch, args=(child, over))
    thread.start()
    over.set()
    thread.join(10)
    assert not thread.is_alive()
    assert child.poll() is None, "a child that never served is left alone"
    child.kill()
    child.wait()


def test_interactive_jobs_do_not_bounce_off_a_dead_engine(site: Site) -> None:
    """They are fetched although the engine has no seat: a rank that starts anew must not cost them their deliveries."""
    site.worker("--max-batch", "2", executor="multiproc")
    site.serving(1)
    ids = site.submit(40, priority="interactive", params={"sleep_s": 0.05})
    until(lambda: site.client.counts()["succeeded"] >= 2)
    site.ranks()[0].kill()
    records = site.wait(ids)
    assert not any(record.dead for record in records), [record.error for record in records if record.dead]
    assert max(record.attempt for record in records) <= 3
    site.check(records)
    site.nothing_is_left()
