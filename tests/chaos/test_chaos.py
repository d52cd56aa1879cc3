"""Everything that can be killed is killed, at random: nothing is lost, seen twice or left behind."""

from __future__ import annotations

import time

import pytest
from saggar.jobs.record import JobRecord
from saggar.workers.servers import Kind

from tests.chaos.conftest import MakeSite
from tests.chaos.storm import Storm
from tests.support.cluster import until
from tests.support.site import Site
from tests.support.weed import S3Server

pytestmark = pytest.mark.e2e


def story(site: Site, record: JobRecord) -> str:
    """What is known of a job that ended in a way that it should not."""
    events = [
        (event.kind, event.attempt, str(event.time)) for event in site.client.events(record.id, follow=False)
    ]
    said = [line for line in site.logs().splitlines() if record.id in line]
    return f"{record!r}\n{events}\n" + "\n".join(said[-100:])


def revive_the_unlucky(site: Site, records: list[JobRecord]) -> list[JobRecord]:
    """Jobs whose worker was killed three times over them are dead letters, as they should be; they are tried again."""
    dead = [record for record in records if record.dead]
    for record in dead:
        assert record.error is not None and record.error.kind == "worker_died", story(site, record)
        assert [event.kind for event in site.terminal(record.id)] == ["failed"]
        site.client.retry(record.id)
    storage = site.open_store()
    for record in site.wait([record.id for record in dead], 120):
        assert [event.kind for event in site.terminal(record.id)] == ["failed", "succeeded"]
        site.check_result(storage, record)
    storage.close()
    return [record for record in records if not record.dead]


def weather(storm: Storm, timeout_s: float) -> None:
    site, began = storm.site, time.monotonic()
    records = storm.run(timeout_s)
    took = time.monotonic() - began
    assert storm.killed == storm.kills
    assert len(records) == storm.jobs == sum(site.client.counts().values())
    lucky = revive_the_unlucky(site, records)
    site.check(lucky)
    again = sum(record.attempt > 1 for record in records)
    suspects = sum(record.suspicions > 0 for record in records)
    print(
        f"seed {storm.seed}: {len(records)} jobs, {dict(storm.killed)}, {took:.0f} s; "
        f"{again} attempted again, {suspects} suspects, {len(records) - len(lucky)} dead letters"
    )
    until(lambda: len(site.ranks()) == storm.workers, 60, "all workers back")
    site.serving(storm.workers)
    site.nothing_is_left()


@pytest.mark.parametrize(("seed", "kind"), [(1, "valkey"), (2, "redis")])
def test_a_storm_over_200_jobs(make_site: MakeSite, s3_server: S3Server, seed: int, kind: Kind) -> None:
    site = make_site(s3=s3_server, lease_s=4.0, kind=kind)
    kills = {"worker": 4, "redis": 1, "s3": 1, "rank": 2}
    weather(Storm(site, seed, 200, kills, spread_s=20), timeout_s=150)


def test_a_storm_over_200_jobs_into_a_folder(make_site: MakeSite) -> None:
    """Small outputs are published in groups there."""
    kills = {"worker": 5, "redis": 1, "rank": 2}
    weather(Storm(make_site(lease_s=4.0), 3, 200, kills, spread_s=20), timeout_s=150)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("seed", "kind"), [(21, "valkey"), (22, "redis")])
def test_a_storm_over_1000_jobs_into_a_folder(make_site: MakeSite, seed: int, kind: Kind) -> None:
    kills = {"worker": 22, "redis": 5, "rank": 5}
    weather(Storm(make_site(lease_s=6.0, kind=kind), seed, 1000, kills, spread_s=100), timeout_s=600)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "kind"), [(11, "valkey"), (12, "redis"), (13, "valkey"), (14, "redis"), (15, "valkey")]
)
def test_a_storm_over_1000_jobs(make_site: MakeSite, s3_server: S3Server, seed: int, kind: Kind) -> None:
    site = make_site(s3=s3_server, lease_s=6.0, kind=kind)
    kills = {"worker": 20, "redis": 5, "s3": 2, "rank": 5}
    weather(Storm(site, seed, 1000, kills, spread_s=100), timeout_s=600)
