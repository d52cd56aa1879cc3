"""The message that stands for a job in its lane: built at submit, and again when another is needed."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING

from saggar.jobs.cards import ModelCard, batch_key
from saggar.jobs.lanes import LaneMessage, celery_message, lane_name
from saggar.jobs.schema import Job

if TYPE_CHECKING:
    from saggar.jobs.lanes.message import Json

TASK = "saggar.generate"
PUT_HEADER = "job_put"  # which message of the job this is; absent: the first


_ALONE = "alone:"  # a batch key that no other job has; all others are JSON


def alone_key(job_id: str) -> str:
    """The batch key under which a suspect waits, so that its next crash harms nobody else."""
    return _ALONE + job_id


def is_alone(key: str) -> bool:
    """Whether a batch key is a suspect's."""
    return key.startswith(_ALONE)


def micros(time: datetime | None) -> int:
    """Microseconds since the epoch; 0 for None."""
    return round(time.timestamp() * 1_000_000) if time else 0


def job_message(
    job: Job,
    card: ModelCard | None,
    *,
    put: int = 1,
    extras: str = "",
    eta_us: int | None = None,
    alone: bool = False,
) -> LaneMessage:
    """The `put`-th message of a checked job. `extras` is JSON of {"headers": ..., "embed": ...}: what links,
    groups and chords of Celery need; `eta_us` overrides the job's own not_before; `alone`: it shares no batch."""
    more: dict[str, dict[str, Json]] = json.loads(extras) if extras else {}
    headers = dict(more.get("headers", {}))
    if not extras:  # the ledger stores Celery's result itself; links and chords need Celery to do so too
        headers["ignore_result"] = True
    if put > 1:
        headers[PUT_HEADER] = put
    return celery_message(
        TASK,
        job.id,
        lane_name(job.model),
        priority_class=job.priority_class,
        batch_key=alone_key(job.id) if alone else batch_key(job, card),
        rows=job.num_outputs,
        eta_us=micros(job.not_before) if eta_us is None else eta_us,
        headers=headers,
        embed=more.get("embed"),
    )
