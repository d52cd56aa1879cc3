"""A cancel in each phase of a job's life; its neighbours' pictures stay what they are."""

from __future__ import annotations

import time

import pytest

from tests.support.cluster import until
from tests.support.site import LANE, Site

pytestmark = pytest.mark.e2e

STEP_S = 0.25
ENOUGH_S = 5.0  # the promise is a second and a step; the machine may be busy with other things


def cancelled_within(site: Site, job_id: str) -> float:
    began = time.monotonic()
    site.client.cancel(job_id)
    record = site.client.wait(job_id, 30)
    assert record.state == "cancelled"
    assert [event.kind for event in site.terminal(job_id)] == ["cancelled"]
    took = time.monotonic() - began
    print(f"cancelled after {took:.2f} s")
    return took


def ends_well(site: Site, others: list[str]) -> None:
    records = site.wait(others)
    assert {record.attempt for record in records} <= {1}
    site.check(records)
    site.nothing_is_left()


def test_while_it_waits_in_its_lane(site: Site) -> None:
    ids = site.submit(10)
    assert cancelled_within(site, ids[3]) < ENOUGH_S
    site.worker()
    ends_well(site, [job_id for job_id in ids if job_id != ids[3]])


def test_while_it_is_in_hand_and_waits_for_the_engine(site: Site) -> None:
    ids = site.submit(16, params={"sleep_s": STEP_S, "steps": 12})
    site.worker()
    until(lambda: site.lane.size(LANE).leased == 16, 60)
    waiting = until(
        lambda: (
            [r.id for r in site.client.list(state="running").records if not r.progress and r.attempt]
            if site.client.counts()["running"] == 16
            else []
        )
    )
    assert cancelled_within(site, waiting[-1]) < ENOUGH_S
    ends_well(site, [job_id for job_id in ids if job_id != waiting[-1]])


def test_while_it_runs_among_others(site: Site) -> None:
    ids = site.submit(8, params={"sleep_s": STEP_S, "steps": 16})
    site.worker()
    until(lambda: all(site.client.status(job_id).progress for job_id in ids), 60)
    assert cancelled_within(site, ids[2]) < ENOUGH_S
    ends_well(site, [job_id for job_id in ids if job_id != ids[2]])


def test_while_its_upload_waits_for_the_store(s3_site: Site) -> None:
    s3_site.worker()
    s3_site.serving(1)
    s3_site.s3.kill()
    ids = s3_site.submit(4)
    until(lambda: all(uploading(s3_site, job_id) for job_id in ids), 60)
    took = cancelled_within(s3_site, ids[0])
    s3_site.s3.start()
    assert took < 3 * ENOUGH_S
    ends_well(s3_site, ids[1:])
    assert not any(s3_site.folder.glob("spool/slot-*/job-*"))


def uploading(site: Site, job_id: str) -> bool:
    return any(event.kind == "uploading" for event in site.client.events(job_id, follow=False))


def test_once_its_manifest_stands_it_can_only_succeed(s3_site: Site) -> None:
    (job_id,) = s3_site.submit(1)
    assert s3_site.sabotaged("dies after manifest").wait(60) < 0
    s3_site.client.cancel(job_id)
    s3_site.worker()
    (record,) = s3_site.wait([job_id])
    s3_site.check([record])
    s3_site.nothing_is_left()
