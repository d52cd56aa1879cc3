"""The errors of saggar.jobs, one tree, one line of meaning each.

SaggarError
├── ConfigError        a setting or URL is wrong; nothing was started
├── InvalidJob         the job's fault, final: names the field and what is allowed
│   └── UnknownModel   no worker has ever published a card for this model
├── InvalidCard        a model card cannot be read or served (the publisher's fault)
├── Conflict           the id or idempotency key already belongs to another spec or id
├── UnknownJob         no such job: never submitted, or its record has expired
├── NotRetryable       the job is not in a state that `retry` may leave
├── UnknownRun         no such run: never started here, or forgotten
├── RunChanged         the run's name already belongs to another manifest
├── RunBusy            another controller holds the run
├── QueueFull          the lane is at its high water; try again after `retry_after_s`
├── WaitTimeout        the job had not ended when the time was over (also a TimeoutError)
└── JobFailed          the job ended otherwise than by success; carries the record

Messages never contain a prompt: they travel into logs and dashboards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from saggar.jobs.record import JobRecord


class SaggarError(Exception):
    """The root of the tree."""


class ConfigError(SaggarError):
    """A setting or URL is wrong; nothing was started."""


class InvalidJob(SaggarError):
    """The job can never run as it is. `str()` is one line naming the field and the allowed values."""

    def __init__(self, field: str, message: str, allowed: str = "") -> None:
        # The arguments stay whole: an error is made again from them after a trip through Celery's JSON.
        super().__init__(field, message, allowed)
        self.field, self.message, self.allowed = field, message, allowed

    def __str__(self) -> str:
        line = f"{self.field}: {self.message}" + (f" (allowed: {self.allowed})" if self.allowed else "")
        return " ".join(line.split())


class UnknownModel(InvalidJob):
    """No worker has ever published a card for this model."""


class InvalidCard(SaggarError):
    """A model card cannot be read, or uses a form of JSON Schema that jobs cannot be checked against."""


class Conflict(SaggarError):
    """The id or idempotency key already belongs to a job with another spec, or, where a message names its job, with
    another id (`other`). Nothing was changed."""

    def __init__(self, field: str, job_id: str, other: str = "spec") -> None:
        super().__init__(field, job_id, other)  # whole, as in InvalidJob
        self.field, self.job_id, self.other = field, job_id, other

    def __str__(self) -> str:
        return (
            f"{self.field}: job {self.job_id} was submitted with it and another {self.other} "
            f"(allowed: the same {self.other} again, or another {self.field})"
        )


class UnknownJob(SaggarError):
    """No such job: never submitted, or its record has expired."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        super().__init__(f"job {job_id[:128]!r} is unknown: never submitted, or its record has expired")

    def __reduce__(self) -> tuple[type[UnknownJob], tuple[str]]:
        return type(self), (self.job_id,)


class UnknownRun(SaggarError):
    """No such run: never started here, or forgotten."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"run {name[:128]!r} is unknown: never started here, or forgotten")

    def __reduce__(self) -> tuple[type[UnknownRun], tuple[str]]:
        return type(self), (self.name,)


class RunChanged(SaggarError):
    """The run's name already belongs to another manifest. Nothing was changed."""


class RunBusy(SaggarError):
    """Another controller holds the run."""


class NotRetryable(SaggarError):
    """Only failed, cancelled and expired jobs can be tried again."""


class QueueFull(SaggarError):
    """The lane is at its high water. Nothing was queued; try again after `retry_after_s` seconds."""

    def __init__(self, lane: str, backlog: int, retry_after_s: float) -> None:
        self.lane, self.backlog, self.retry_after_s = lane, backlog, retry_after_s
        super().__init__(f"lane {lane} is full: {backlog} jobs wait; try again in {retry_after_s:g} s")

    def __reduce__(self) -> tuple[type[QueueFull], tuple[str, int, float]]:
        return type(self), (self.lane, self.backlog, self.retry_after_s)


class RedisFull(QueueFull):
    """Redis is at its memory limit. Nothing was queued; workers go on and make room."""

    def __init__(self, lane: str, retry_after_s: float) -> None:
        super().__init__(lane, 0, retry_after_s)
        self.args = (f"Redis has no memory left: try again in {retry_after_s:g} s",)

    def __reduce__(self) -> tuple[type[RedisFull], tuple[str, float]]:  # type: ignore[override]
        return type(self), (self.lane, self.retry_after_s)


class WaitTimeout(SaggarError, TimeoutError):
    """The job had not ended when the time was over; it goes on."""


class JobFailed(SaggarError):
    """The job ended otherwise than by success. `record` is there when the ledger raised it, and
    absent when Celery rebuilt the exception from a stored result (which carries only the message)."""

    def __init__(self, message: str, record: JobRecord | None = None) -> None:
        self.record = record
        super().__init__(message)
