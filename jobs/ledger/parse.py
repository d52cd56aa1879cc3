"""From Redis's replies to typed values."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, cast

from saggar.jobs.errors import Conflict, InvalidJob, QueueFull
from saggar.jobs.ledger.script import Reply
from saggar.jobs.record import TERMINAL, JobError, JobRecord, JobResult, Progress, State, Times
from saggar.jobs.schema import Job, read_job

log = logging.getLogger(__name__)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Orders = Literal["go", "cancel", "deadline", "fenced"]


@dataclass(frozen=True, slots=True)
class Submitted:
    """`created` False: the same job was there already, under `id`, and is in `state`."""

    id: str
    created: bool
    state: State


@dataclass(frozen=True, slots=True)
class Started:
    """The attempt is the caller's. `suspicions`: earlier attempts whose worker died while executing it;
    `crashed`: the last one was such. `stopping`: it was cancelled or its deadline passed since."""

    attempt: int
    job: Job
    suspicions: int
    digest: str
    crashed: bool
    stopping: bool


@dataclass(frozen=True, slots=True)
class NotStarted:
    """The message has nothing to do: acknowledge it. `ended` (in `state`), `stale` (another message is the
    valid one), `unknown`, or `unreadable`: the job has just failed with `error`."""

    reason: Literal["ended", "stale", "unknown", "unreadable"]
    state: State | None = None
    error: JobError | None = None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The attempt has begun, and its job cannot be understood: `why`."""

    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class Ending:
    """`won` False: fenced; `state` is what stands (None: unknown job)."""

    won: bool
    state: State | None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """`done`: it is over now. `requested`: it runs, at `owner`, and has been told to stop. `ended`: it was
    over before, in `state`. `unknown`: no such job; one of this id that comes later ends at once."""

    outcome: Literal["done", "requested", "ended", "unknown"]
    state: State | None = None
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """`cursor` None: the end. A page may be short, or empty, before the end."""

    records: list[JobRecord]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class Broken:
    """An open job whose message is lost, or has become a dead letter."""

    id: str
    what: Literal["lost", "dead"]
    put: int
    spec: str
    extras: str


def time_of(us: str | int) -> datetime:
    return EPOCH + timedelta(microseconds=int(us))


def rows(reply: Reply) -> list[Reply]:
    if not isinstance(reply, list):
        raise TypeError(f"a list was expected from Redis, not {type(reply).__name__}")
    return reply


def submitted(reply: Reply, lane: str, retry_after_s: float) -> Submitted:
    """Raises Conflict, QueueFull, InvalidJob."""
    outcome, job_id, detail = cast("list[str]", rows(reply))
    if outcome == "conflict":
        raise Conflict(detail, job_id)
    if outcome == "full":
        raise QueueFull(lane, int(detail), retry_after_s)
    if outcome == "late":
        raise InvalidJob("deadline", "is over already", "a time to come, on Redis's clock")
    return Submitted(job_id, outcome != "same", cast("State", detail))


def started(reply: Reply) -> Started | NotStarted | Unreadable:
    outcome, *rest = rows(reply)
    if outcome == "started":
        attempt, spec, suspicions, digest, crashed, stopping = rest
        try:
            job = read_job(cast("str", spec))
        except InvalidJob as error:
            return Unreadable(cast("int", attempt), str(error))
        return Started(
            cast("int", attempt),
            job,
            cast("int", suspicions),
            cast("str", digest),
            bool(crashed),
            bool(stopping),
        )
    state = cast("State", rest[0]) if rest else None
    return NotStarted(cast("Literal['ended', 'stale', 'unknown']", outcome), state)


def ending(reply: Reply) -> Ending:
    won, state = rows(reply)
    return Ending(bool(won), cast("State", state) if state else None)


def cancelled(reply: Reply) -> Cancelled:
    outcome, detail = cast("list[str]", rows(reply))
    if outcome == "ended":
        return Cancelled("ended", cast("State", detail))
    if outcome == "cancelled":
        return Cancelled("done", "cancelled")
    if outcome == "requested":
        return Cancelled("requested", "running", detail)
    return Cancelled("unknown")


def record(reply: Reply) -> JobRecord | None:
    """Of get.lua: place and fields. Raises InvalidJob for a job that cannot be read."""
    place, fields = rows(reply)
    flat = rows(fields)
    return _record(flat, cast("int", place)) if flat else None


def page(reply: Reply) -> Page:
    """Of list.lua. The cursor is `score:id`. A job that cannot be read is left out, and the log says so."""
    score, last, *entries = rows(reply)
    records = []
    for entry in entries:
        job_id, fields = rows(entry)
        try:
            records.append(_record(rows(fields), -1))
        except InvalidJob as error:
            log.warning("job %s cannot be read: %s", job_id, error)
    return Page(records, f"{score}:{last}" if score else None)


def broken(reply: Reply) -> tuple[list[Broken], str | None]:
    score, last, *entries = rows(reply)
    found = [Broken(*cast("tuple[str, Literal['lost', 'dead'], int, str, str]", entry)) for entry in entries]
    return found, f"{score}:{last}" if score else None


def counts(reply: Reply) -> dict[State, int]:
    flat = rows(reply)
    return dict(zip(cast("list[State]", flat[::2]), cast("list[int]", flat[1::2]), strict=True))


def orders(reply: Reply) -> Orders:
    return cast("Orders", reply)


def _record(flat: Sequence[Reply], place: int) -> JobRecord:
    field = cast("dict[str, str]", dict(zip(flat[::2], flat[1::2], strict=True)))
    job = read_job(field["spec"])
    started_at, ended_at, step = field.get("started"), field.get("ended"), field.get("step")
    result, error = field.get("result"), field.get("error")
    state = cast("State", field["state"])
    times = Times(
        submitted=time_of(field["at"]),
        started=time_of(started_at) if started_at else None,
        finished=time_of(ended_at) if ended_at and state in TERMINAL else None,
    )
    return JobRecord(
        id=job.id,
        state=state,
        job=job,
        digest=field["digest"],
        put=int(field.get("put", 1)),
        attempt=int(field.get("attempt", 0)),
        owner=field.get("owner"),
        cancel_requested="stop" in field,
        suspicions=int(field.get("suspicions", 0)),
        dead="dead" in field,
        progress=Progress(step=int(step), steps=int(field["steps"])) if step else None,
        result=JobResult.model_validate_json(result) if result else None,
        error=JobError.model_validate_json(error) if error else None,
        times=times,
        position=place if place >= 0 else None,
        extras=field.get("extras", ""),
    )
