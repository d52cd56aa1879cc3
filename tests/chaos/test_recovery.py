"""How long it takes until work goes on, with the settings that users have. The promises are the bounds."""

from __future__ import annotations

import time

import pytest

from tests.chaos.conftest import MakeSite
from tests.support.cluster import until
from tests.support.site import Site

pytestmark = pytest.mark.e2e


@pytest.fixture
def plain_site(make_site: MakeSite) -> Site:
    """With the default lease."""
    return make_site(lease_s=60.0)


def test_jobs_of_a_killed_worker_run_elsewhere_within_25_seconds(plain_site: Site) -> None:
    site = plain_site
    workers = [site.worker(), site.worker()]
    site.serving(2)
    ids = site.submit(8, params={"sleep_s": 0.5, "steps": 16})
    until(lambda: all(site.client.status(job_id).progress for job_id in ids), 60)
    records = [site.client.status(job_id) for job_id in ids]
    victim = next(worker for worker in workers if worker.has(records[0]))
    lost = [record.id for record in records if victim.has(record)]
    victim.kill()
    took = seconds(lambda: all(site.client.status(job_id).attempt > 1 for job_id in lost), 60)
    print(f"killed worker's jobs running elsewhere after {took:.1f} s")
    assert took <= 25
    site.check(site.wait(ids))
    site.nothing_is_left()


@pytest.mark.parametrize("away_s", [1.0, 25.0])
def test_redis_is_back_and_jobs_are_consumed_within_10_seconds(plain_site: Site, away_s: float) -> None:
    site = plain_site
    site.worker()
    site.serving(1)
    site.wait(site.submit(1))
    site.redis.kill()
    time.sleep(away_s)  # how long it is away
    site.redis.start()
    ids = site.submit(1, first=1)
    took = seconds(lambda: site.client.status(ids[0]).times.started, 60)
    print(f"Redis away for {away_s:.0f} s: consuming {took:.1f} s after its return")
    assert took <= 10
    site.check(site.wait(ids))
    site.nothing_is_left()


def seconds(condition, timeout_s: float) -> float:
    began = time.monotonic()
    until(condition, timeout_s)
    return time.monotonic() - began
