"""A store that is away: nothing fails, and the engine goes on until the spool is full."""

from __future__ import annotations

import random
import string
import time

import pytest

from tests.support.cluster import until
from tests.support.site import LANE, Site

pytestmark = pytest.mark.e2e


def spooled(site: Site) -> int:
    return sum(1 for entry in (site.folder / "spool").glob("slot-*/*") if not entry.name.startswith("."))


@pytest.mark.parametrize("away_s", [0, pytest.param(60, marks=pytest.mark.soak)])
def test_an_outage_amid_50_jobs_fails_none_and_the_engine_does_not_pause(s3_site: Site, away_s: int) -> None:
    """Away until all are made, or longer."""
    s3_site.worker()
    s3_site.serving(1)
    ids = s3_site.submit(50, params={"sleep_s": 0.1})
    until(lambda: s3_site.client.counts()["succeeded"] >= 8)
    s3_site.s3.kill()
    until(lambda: spooled(s3_site) + s3_site.client.counts()["succeeded"] >= 50, 60, "all made meanwhile")
    time.sleep(away_s)
    assert s3_site.client.counts()["failed"] == s3_site.client.counts()["cancelled"] == 0
    s3_site.s3.start()
    records = s3_site.wait(ids)
    assert {record.attempt for record in records} == {1}
    s3_site.check(records)
    assert spooled(s3_site) == 0
    s3_site.nothing_is_left()


def test_a_full_spool_pauses_the_engine_and_fails_none(s3_site: Site) -> None:
    """A megabyte of room, and forty kilobytes a job."""
    text = "".join(random.Random(1).choices(string.printable[:62], k=20_000))
    s3_site.worker(SAGGAR_SPOOL_LIMIT_BYTES=str(1 << 20))
    s3_site.serving(1)
    s3_site.s3.kill()
    ids = s3_site.submit(100, prompt=text)
    until(lambda: spooled(s3_site) >= 15, 60, "a filling spool")
    until(lambda: steady(s3_site), 60, "a pause")
    assert s3_site.lane.size(LANE).waiting > 0, "the rest waits in the lane, where others can have it"
    s3_site.s3.start()
    records = s3_site.wait(ids)
    assert {record.attempt for record in records} == {1}
    s3_site.check(records)
    assert spooled(s3_site) == 0
    s3_site.nothing_is_left()


def steady(site: Site, seconds: float = 3.0) -> bool:
    """Nothing was fetched for a while."""
    before = site.lane.size(LANE)
    time.sleep(seconds)  # what does not happen cannot be waited for
    return site.lane.size(LANE) == before
