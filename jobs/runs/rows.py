"""What a controller makes of jobs: their draws, and how their rows end. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from saggar.jobs.record import JobRecord
from saggar.jobs.runs.contract import Ended, Verdict
from saggar.jobs.runs.ledger import Letter, Settled
from saggar.jobs.schema import MAX_SEED, Job

T = TypeVar("T")
_LETTER: Mapping[str, Letter] = {"done": "d", "rejected": "r", "failed": "f"}


def draw_id(row_id: str, draw: int) -> str:
    """The job id of a row's draw, from 0, which has the row's own."""
    return f"{row_id}-r{draw}" if draw else row_id


def row_of(job_id: str, draw: int) -> str:
    """The id of the row whose draw this is."""
    return job_id.removesuffix(f"-r{draw}") if draw else job_id


def redrawn(job: Job, draw: int, stride: int = 0) -> Job:
    """The next draw of a row whose draw number `draw` this job was: an id of its own, and the seeds that follow.
    `stride`: of the seeds that rows of equal content share among them, so that none is drawn twice."""
    name = draw_id(row_of(job.id, draw), draw + 1)
    seed = (job.seed or 0) + max(stride, job.num_outputs)
    return job.model_copy(update={"id": name, "seed": seed % (MAX_SEED - job.num_outputs)})


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Parts of at most `size`."""
    return (items[first : first + size] for first in range(0, len(items), size))


def settled(one: Ended, verdict: Verdict, *, keep: bool) -> Settled:
    """A row with this verdict, which is an end. `keep`: what is done may be lost yet."""
    result = one.record.result
    return Settled(
        one.n,
        one.record.id,
        _LETTER[verdict.to],
        kind=None if verdict.to == "done" else verdict.to,
        message=verdict.why,
        batch=max(1, result.batch_size) if result else None,
        bytes=verdict.bytes,
        pictures=_pictures(one.record, verdict),
        picks=verdict.picks,
        refused=verdict.refused or None,
        keep=keep and verdict.to == "done",
    )


def _pictures(record: JobRecord, verdict: Verdict) -> int:
    """How many count, of all the row's draws."""
    if verdict.to != "done":
        return 0
    return verdict.picks.count("=") if verdict.picks else record.job.num_outputs


def not_made(n: int, record: JobRecord) -> Settled:
    """Row `n` by its job, which has ended without a result."""
    if record.state == "cancelled":
        return Settled(n, record.id, "c")
    if record.error is not None:
        return Settled(n, record.id, "f", kind=record.error.kind, message=record.error.message[:500])
    return Settled(n, record.id, "f", kind=record.state, message="its deadline passed")
