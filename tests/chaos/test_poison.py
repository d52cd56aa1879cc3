"""Jobs that kill the rank they run on, each time: they end by themselves, with their history, and nobody else does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from saggar.jobs.record import JobRecord

from tests.support.site import ROOT, Site

pytestmark = [pytest.mark.e2e, pytest.mark.procs]

IN_EVERY_RANK = """
import sys
if "saggar.engine.worker.process" in sys.orig_argv:
    import os, signal
    from saggar.engine.models.noop import Noop
    predict = Noop.predict

    def poisoned(self, rows, branch):
        if any(row.state.request.prompt.startswith("poison") for row in rows):
            os.kill(os.getpid(), signal.SIGKILL)
        return predict(self, rows, branch)

    Noop.predict = poisoned
"""


def poisonable(folder: Path) -> dict[str, str]:
    """The environment of a worker whose ranks die of a prompt: Python runs `sitecustomize` in every process."""
    inject = folder / "inject"
    inject.mkdir()
    (inject / "sitecustomize.py").write_text(IN_EVERY_RANK)
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join([str(inject), *before, str(ROOT)])}


def poison(site: Site, number: int) -> str:
    (job_id,) = site.submit(1, first=number, prompt=f"poison {number}")
    return job_id


def ended_by_its_suspicions(record: JobRecord) -> None:
    """Three ranks died of it: with company, alone, and alone again."""
    assert (record.state, record.dead, record.suspicions) == ("failed", True, 3), record
    assert record.error is not None and record.error.kind == "worker_died"


@pytest.mark.parametrize("poisons", [1, pytest.param(8, marks=pytest.mark.soak)])
def test_a_job_that_kills_its_rank_each_time_is_a_dead_letter_and_its_neighbours_succeed(
    site: Site, tmp_path: Path, poisons: int
) -> None:
    worker = site.worker(executor="multiproc", **poisonable(tmp_path))
    site.serving(1)
    ids, bad = [], []
    for number in range(poisons):
        ids += site.submit(8, first=10 * number, params={"sleep_s": 0.02})
        bad.append(poison(site, 10 * number + 8))
    ids += site.submit(8, first=100)
    records = site.wait(ids + bad, 300)
    for record in records[len(ids) :]:
        ended_by_its_suspicions(record)
        kinds = [event.kind for event in site.client.events(record.id, follow=False)]
        assert kinds.count("retrying") >= 2
        assert kinds.count("failed") == 1
        (listed,) = [one for one in site.client.list(state="failed").records if one.id == record.id]
        assert listed.dead
    site.check(records[: len(ids)])
    # Its supervisor lives: it started the worker again if deaths followed each other without a success between.
    log = worker.log.read_text()
    assert worker.process.poll() is None
    assert log.count("the engine is lost") <= poisons
    assert log.count("starting it again") == log.count("the engine is lost")
    site.nothing_is_left()
