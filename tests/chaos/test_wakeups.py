"""No lost wake-up: whatever the draw of keys, rows, classes and cancels, a worker comes to the end of its lane."""

from __future__ import annotations

import random
import time

import pytest

from tests.support.cluster import until
from tests.support.site import LANE, Site

pytestmark = pytest.mark.e2e

RUNS, JOBS = 20, 500


def drawn(draw: random.Random, run: int, number: int) -> dict[str, object]:
    return {
        "id": f"r{run}-{number}",
        "model": "noop",
        "prompt": str(number),
        "num_outputs": draw.choice([1] * 12 + [2, 3, 7, 11]),  # eleven are more than a batch
        "priority": draw.choice(["bulk"] * 6 + ["normal", "interactive"]),
        "params": {"steps": 1, "height": 8, "width": 8, "key": f"k{draw.randrange(1 + 7 * run)}"},
    }


def test_every_run_ends(site: Site) -> None:
    worker = site.worker()
    site.serving(1)
    draw = random.Random(7)
    for run in range(RUNS):
        jobs = [drawn(draw, run, number) for number in range(JOBS)]
        for outcome in site.client.submit_many(jobs):
            assert not isinstance(outcome, Exception), outcome
        for job in draw.sample(jobs, 10):
            site.client.cancel(str(job["id"]))
        until(lambda: not open_jobs(site), 120, f"the end of run {run}")
        assert worker.process.poll() is None
    counts = site.client.counts()
    assert counts["succeeded"] + counts["cancelled"] == RUNS * JOBS
    site.nothing_is_left()


def open_jobs(site: Site) -> int:
    counts = site.client.counts()
    return counts["queued"] + counts["running"]


def test_a_message_put_without_a_ring_is_found_soon(site: Site) -> None:
    """The bell is a hint: a worker that was not told looks by itself."""
    site.worker()
    site.serving(1)
    site.wait(site.submit(1))
    until(lambda: site.server.exists(f"{site.lane.base(LANE)}:h"), what="a worker that found nothing")
    site.server.delete(
        f"{site.lane.base(LANE)}:h", f"{site.lane.base(LANE)}:u"
    )  # nobody listens, says the lane
    began = time.monotonic()
    site.check(site.wait(site.submit(1, first=1), 5))
    assert time.monotonic() - began <= 5
    site.nothing_is_left()
