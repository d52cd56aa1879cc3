"""Steps of a job that the ledger's tests take."""

from __future__ import annotations

import json

import redis
from saggar.jobs import JobError, Ledger
from saggar.jobs.desk import Desk
from saggar.jobs.ledger import Started

from tests.jobs.samples import SETTINGS

BOOM = JobError(kind="permanent", message="it broke")


def begin(ledger: Ledger, job_id: str, token: str | None = None) -> int:
    started = ledger.start(job_id, "w1", token)
    assert isinstance(started, Started)
    return started.attempt


def retry(ledger: Ledger, job_id: str) -> None:
    """As a producer."""
    record = ledger.get(job_id)
    assert record is not None
    assert ledger.runner.run(Desk.of(SETTINGS).revival(record))


def celery_meta(fake: redis.Redis, job_id: str) -> dict[str, object]:
    return json.loads(fake.get(f"celery-task-meta-{job_id}"))  # type: ignore[arg-type]
