"""What the clients with and without asyncio share: how jobs become operations, and answers become values.

Pure, apart from the clock: no connection here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from saggar.jobs.cards import ModelCard, completed, parse_card, unknown_model
from saggar.jobs.errors import InvalidCard, InvalidJob, JobFailed, SaggarError, UnknownJob, WaitTimeout
from saggar.jobs.ledger.message import job_message
from saggar.jobs.ledger.ops import Ops
from saggar.jobs.ledger.parse import Submitted
from saggar.jobs.ledger.script import Op
from saggar.jobs.record import JobRecord, JobResult
from saggar.jobs.schema import Job, parse_job
from saggar.jobs.settings import JobSettings

JobLike = Job | dict[str, object] | str | bytes
LOOK_S = 2.0  # how often a waiter looks at the record itself: a published message can be lost

_NO_CARD: tuple[float, ModelCard | InvalidCard | None] = (-math.inf, None)


class CardCache:
    """Cards by model, for a short time. Models without one are not remembered. One that cannot be read is an error
    for jobs of its model alone."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._cards: dict[str, tuple[float, ModelCard | InvalidCard]] = {}

    def missing(self, jobs: Iterable[Job | SaggarError]) -> list[str]:
        """Models of these jobs that must be asked for."""
        now = time.monotonic()
        models = {job.model for job in jobs if isinstance(job, Job)}
        return sorted(m for m in models if self._cards.get(m, _NO_CARD)[0] < now)

    def add(self, models: Sequence[str], texts: Sequence[str | None]) -> None:
        """What Redis answered for the missing ones. Other threads meet the old card or the new one, never none."""
        until = time.monotonic() + self._keep_s
        for model, text in zip(models, texts, strict=True):
            if text is None:
                self._cards.pop(model, None)
            else:
                self._cards[model] = (until, _card_or_error(text))

    def __contains__(self, model: str) -> bool:
        return model in self._cards

    def get(self, model: str) -> ModelCard | None:
        """Raises InvalidCard for one that cannot be read."""
        _, card = self._cards.get(model, _NO_CARD)
        if isinstance(card, InvalidCard):
            raise InvalidCard(f"{model}: {card}")
        return card


def _card_or_error(text: str) -> ModelCard | InvalidCard:
    try:
        return parse_card(text)
    except InvalidCard as error:
        return error


@dataclass(frozen=True, slots=True)
class Desk:
    """Settings, operations and cards of one client."""

    settings: JobSettings
    ops: Ops
    cards: CardCache

    @classmethod
    def of(cls, settings: JobSettings) -> Desk:
        return cls(settings, Ops(settings), CardCache(settings.card_cache_s))

    @property
    def cards_key(self) -> str:
        return self.settings.key_prefix + "cards"

    def result_channel(self, job_id: str) -> str:
        """Where Celery's result is published: the wake-up of a waiter."""
        return self.settings.result_key_prefix + job_id

    def lacks_card(self, job: Job | SaggarError) -> bool:
        """Whether the job will be refused because its model has no card."""
        return isinstance(job, Job) and not job.allow_unserved and job.model not in self.cards

    def submission(self, job: Job, known: Sequence[str]) -> Op[Submitted]:
        """Raises InvalidJob; UnknownModel, which lists the `known` models; InvalidCard."""
        card = self.cards.get(job.model)
        if card is None and not job.allow_unserved:
            raise unknown_model(job.model, known)
        checked = completed(job, card)
        return self.ops.submit(checked, job_message(checked, card), job.digest())

    def submissions(
        self, jobs: Sequence[Job | SaggarError], known: Sequence[str]
    ) -> list[Op[Submitted] | SaggarError]:
        """An operation or an error for each."""
        out: list[Op[Submitted] | SaggarError] = []
        for job in jobs:
            try:
                out.append(job if isinstance(job, SaggarError) else self.submission(job, known))
            except SaggarError as error:
                out.append(error)
        return out

    def revival(self, record: JobRecord) -> Op[bool]:
        """Another attempt for an ended job; its card must have been fetched."""
        card = self.cards.get(record.job.model)
        put = record.put + 1
        message = job_message(record.job, card, put=put, extras=record.extras, eta_us=0)
        return self.ops.revive(record.job, message, put)


class Chunks:
    """Jobs in chunks, checked as they are wanted."""

    def __init__(self, jobs: Iterable[JobLike], chunk: int) -> None:
        """Raises InvalidJob for what cannot be many jobs, or a chunk that is none."""
        if isinstance(jobs, str | bytes | Mapping | Job):
            raise InvalidJob("jobs", f"{type(jobs).__name__} was given", "several jobs; submit takes one")
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            raise InvalidJob("chunk", f"{chunk!r} was given", "an integer, at least 1")
        self._jobs = iter(jobs)
        self._chunk = chunk
        self._failed: Exception | None = None

    def next(self) -> list[Job | SaggarError]:
        """A job or an error for each of the next ones; none at their end. What their source raises is raised once
        all that it gave before is out."""
        if self._failed is not None:
            raise self._failed
        out: list[Job | SaggarError] = []
        try:
            for job in islice(self._jobs, self._chunk):
                out.append(_parsed(job))
        except Exception as error:
            self._failed = error
            if not out:
                raise
        return out


def _parsed(job: JobLike) -> Job | SaggarError:
    try:
        return parse_job(job)
    except SaggarError as error:
        return error


def merged(
    entries: Sequence[Op[Submitted] | SaggarError], answers: Sequence[Submitted | Exception]
) -> Iterator[Submitted | SaggarError]:
    """The answers in the places of their operations. Raises what is no answer (an error of Redis)."""
    rest = iter(answers)
    for entry in entries:
        answer = next(rest) if isinstance(entry, Op) else entry
        if isinstance(answer, Exception) and not isinstance(answer, SaggarError):
            raise answer
        yield answer


def succeeded(record: JobRecord) -> JobResult:
    """Raises JobFailed, which carries the record."""
    if record.result is None:
        why = f": {record.error.kind}: {record.error.message}" if record.error else ""
        raise JobFailed(f"job {record.id} {record.state}{why}", record)
    return record.result


def known(job_id: str, record: JobRecord | None) -> JobRecord:
    """Raises UnknownJob."""
    if record is None:
        raise UnknownJob(job_id)
    return record


class Patience:
    """How long a waiter goes on."""

    def __init__(self, job_id: str, timeout_s: float | None) -> None:
        self._job_id, self._timeout_s = job_id, timeout_s
        self._until = None if timeout_s is None else time.monotonic() + timeout_s

    def left(self) -> float:
        """Seconds until the next look. Raises WaitTimeout."""
        if self._until is None:
            return LOOK_S
        left = self._until - time.monotonic()
        if left <= 0:
            raise WaitTimeout(f"job {self._job_id} had not ended after {self._timeout_s:g} s")
        return min(left, LOOK_S)
