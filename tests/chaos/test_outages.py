"""A store that is away: nothing fails, and the engine goes on until the spool is full."""

from __future__ import annotations

import random
import string
import time

import pytest

from tests.chaos.conftest import FaultySite
from tests.support.cluster import until
from tests.support.faulty_s3 import Call, Says, fine
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


@pytest.mark.parametrize(
    "refusal",
    [
        Says(400, "ExpiredToken", "The provided token has expired."),
        Says(403, "AccessDenied", "Access Denied"),
        Says(404, "NoSuchBucket", "The specified bucket does not exist"),
    ],
    ids=lambda refusal: refusal.code,
)
def test_a_store_that_refuses_everybody_fails_none(faulty_site: FaultySite, refusal: Says) -> None:
    """A token that expired, a policy that changed, a bucket that is gone: made outputs wait until it is mended."""
    site, proxy = faulty_site
    worker = site.worker()
    site.serving(1)
    proxy.rule = lambda _: refusal
    ids = site.submit(20)
    until(lambda: spooled(site) >= 20, 60, "all made meanwhile")
    until(lambda: "takes nothing now" in worker.log.read_text(), 30, "a line that says so")
    assert site.states() == {"running": 20}
    proxy.rule = fine
    records = site.wait(ids)
    assert {record.attempt for record in records} == {1}
    site.check(records)
    assert spooled(site) == 0
    assert proxy.server.secret_key not in site.logs()
    site.nothing_is_left()


def test_a_place_that_is_refused_fails_its_jobs_alone(faulty_site: FaultySite) -> None:
    site, proxy = faulty_site
    site.worker()
    site.serving(1)
    proxy.rule = lambda call: Says(403, "AccessDenied", "Access Denied") if "/closed/" in call.key else None
    refused = site.submit(3, output={"prefix": "closed"})
    others = site.submit(3, first=3)
    assert {record.error.kind for record in site.wait(refused) if record.error} == {"storage"}
    site.check(site.wait(others))
    site.nothing_is_left()


def test_a_worker_ends_while_its_store_does_not_answer(faulty_site: FaultySite) -> None:
    """After the grace time, without what it could not store; another one makes that again."""
    site, proxy = faulty_site
    worker = site.worker("--grace", "1")
    site.serving(1)

    def hang(_: Call) -> None:
        proxy.over.wait()

    proxy.rule = hang
    ids = site.submit(5)
    until(lambda: spooled(site) >= 5, 60, "all made meanwhile")
    worker.terminate()
    until(lambda: not site.processes(), 30, "the end of all processes")
    proxy.rule = fine
    site.worker()
    site.check(site.wait(ids))
    assert spooled(site) == 0


def steady(site: Site, seconds: float = 3.0) -> bool:
    """Nothing was fetched for a while."""
    before = site.lane.size(LANE)
    time.sleep(seconds)  # what does not happen cannot be waited for
    return site.lane.size(LANE) == before


def test_no_secret_and_no_prompt_is_in_a_log_that_says_everything(s3_site: Site) -> None:
    """What boto3 tells of itself holds tokens, signatures and bodies."""
    worker = s3_site.worker("--log-level", "debug")
    s3_site.serving(1)
    records = s3_site.wait(s3_site.submit(2, prompt="a prompt that nobody else may read"))
    assert [record.state for record in records] == ["succeeded"] * 2
    told = worker.log.read_text()
    assert " DEBUG " in told
    assert s3_site.s3 is not None
    secrets = {name: value for name, value in s3_site.s3.env.items() if name.startswith("AWS_")}
    for secret in ("nobody else may read", "AWS4-HMAC", "x-amz-", *secrets.values()):
        assert secret not in told, secret
    s3_site.nothing_is_left()
