"""Leases, repeated commands, wrong clocks, a full Redis: each job runs, and is seen once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from saggar.jobs.errors import QueueFull

from tests.support.cluster import until
from tests.support.site import LANE, Site, freeze, thaw

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("job_s", "lease_s"), [(6, 1.5), pytest.param(30, 5, marks=pytest.mark.soak, id="30 s under 5 s")]
)
def test_a_job_much_longer_than_its_lease_runs_once(make_site, job_s: int, lease_s: float) -> None:
    site = make_site(lease_s=lease_s)
    site.worker()
    site.worker()
    site.serving(2)
    records = site.wait(site.submit(1, params={"sleep_s": 0.5, "steps": 2 * job_s}))
    assert [record.attempt for record in records] == [1]
    site.check(records)
    site.nothing_is_left()


def test_without_its_heartbeat_it_is_delivered_again_and_still_seen_once(make_site) -> None:
    site = make_site(lease_s=1.5)
    site.worker()
    site.serving(1)
    other = site.children()
    for process in other:
        freeze(process)
    silent = site.sabotaged("without heartbeat")
    ids = site.submit(1, params={"sleep_s": 0.5, "steps": 20})
    until(lambda: site.client.status(ids[0]).progress, 60)
    for process in other:
        thaw(process)
    records = site.wait(ids)
    assert records[0].attempt > 1
    assert records[0].suspicions == 1
    assert silent.poll() is None
    site.check(records)
    silent.terminate()
    assert silent.wait(30) == 0
    site.nothing_is_left()


def test_a_restart_of_redis_takes_nobodys_lease(site: Site) -> None:
    ids = site.submit(4, params={"sleep_s": 0.5, "steps": 10})
    site.worker()
    until(lambda: all(site.client.status(job_id).progress for job_id in ids), 60)
    site.worker()
    site.serving(2)
    site.redis.kill()
    site.redis.start()
    records = site.wait(ids)
    assert {record.attempt for record in records} == {1}
    site.check(records)
    site.nothing_is_left()


def test_every_command_sent_twice_changes_nothing(site: Site) -> None:
    ids = site.submit(40, params={"sleep_s": 0.02})
    doubled = site.sabotaged("sends everything twice")
    records = site.wait(ids)
    assert {record.attempt for record in records} == {1}
    site.check(records)
    doubled.terminate()
    assert doubled.wait(30) == 0
    site.nothing_is_left()


def test_workers_clocks_have_no_say(site: Site) -> None:
    """One a minute fast, one a minute slow: leases, deadlines and not-before go by Redis's clock alone."""
    for how in ("clock a minute fast", "clock a minute slow"):
        site.sabotaged(how)
    site.serving(2)
    now = datetime.now(UTC)
    plain = site.submit(32, params={"sleep_s": 0.1})
    later = site.submit(2, first=100, not_before=now + timedelta(seconds=4))
    timely = site.submit(4, first=200, deadline=now + timedelta(seconds=50), params={"sleep_s": 0.1})
    slow = {"sleep_s": 0.5, "steps": 60}
    late = site.submit(2, first=300, deadline=now + timedelta(seconds=5), params=slow)
    records = site.wait(plain + later + timely)
    assert {record.attempt for record in records} == {1}
    assert len({record.owner for record in records}) == 2
    for record in records[32:34]:
        assert record.times.started is not None
        assert record.times.started >= record.job.not_before
    assert {record.state for record in site.wait(late)} == {"expired"}
    site.check(records)
    for child in site.alone:
        child.terminate()
        assert child.wait(30) == 0
    site.nothing_is_left()


def test_a_full_redis_refuses_jobs_and_loses_none(site: Site) -> None:
    worker = site.worker()
    site.serving(1)
    ids = site.submit(200, params={"sleep_s": 0.1})
    until(lambda: site.client.counts()["succeeded"] >= 8)
    site.server.config_set("maxmemory", site.server.info("memory")["used_memory"] // 2)
    with pytest.raises(QueueFull, match="no memory left: try again in 5 s"):
        site.client.submit({"model": "noop", "prompt": "one"})
    many = list(site.client.submit_many([{"model": "noop", "prompt": "p"}] * 3))
    assert all(isinstance(outcome, QueueFull) for outcome in many)
    records = site.wait(ids)
    assert sum(site.client.counts().values()) == 200
    site.server.config_set("maxmemory", 0)
    assert {record.suspicions for record in records} == {0}
    site.check(records)
    assert worker.process.poll() is None
    assert site.lane.size(LANE).dead == 0
    site.nothing_is_left()
