"""Events: what happened to jobs, in order, for whoever looks now, looks late or looks on.

In Redis an event is a stream entry whose fields are its variable parts; `Event.cloud()` is the whole
CloudEvents 1.0 object (JSON format). A job outside a run has a stream of its own; a run has one for all its
jobs, in which bulk jobs only appear as submitted and ended. Streams are bounded and expire. A reader who has
missed something is told by a `gap` event that carries a snapshot.

What is read when is one generator for both worlds (`_follow`); the readers only differ in how they ask Redis.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Literal, cast

from pydantic import JsonValue
from saggar.jobs.errors import UnknownJob
from saggar.jobs.ledger.message import micros
from saggar.jobs.ledger.ops import Ops
from saggar.jobs.ledger.parse import EPOCH
from saggar.jobs.ledger.script import Op
from saggar.jobs.record import TERMINAL, JobRecord, State
from saggar.jobs.schema import check_id
from saggar.jobs.settings import JobSettings

if TYPE_CHECKING:
    from saggar.jobs.ledger.aio import AsyncRunner
    from saggar.jobs.ledger.ledger import Runner

Kind = Literal[
    "submitted",
    "started",
    "progress",
    "uploading",
    "retrying",
    "requeued",
    "succeeded",
    "failed",
    "cancelled",
    "expired",
    "gap",
]
SOURCE = "/saggar/jobs"
TYPE_PREFIX = "saggar.job."
PAGE = 500  # entries read at once
BLOCK_MS = 2_000  # how long one read waits; then the record is looked at: a stream may have expired
Entry = tuple[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Event:
    """`cursor` is the event's place in its stream: give it as `after` to go on behind it. `job` is None only
    for a gap in a run's stream. `data` holds what the kind adds: step and steps, batch_id and batch_size,
    kind and message of an error; of a gap `missed` (how many events; None: not known) and a snapshot."""

    cursor: str
    kind: Kind
    job: str | None
    attempt: int
    sequence: int
    data: dict[str, JsonValue] = field(default_factory=dict)

    @property
    def time(self) -> datetime:
        """On Redis's clock, to the millisecond."""
        return EPOCH + timedelta(milliseconds=int(self.cursor.partition("-")[0]))

    @property
    def ended(self) -> bool:
        return self.kind in TERMINAL

    def cloud(self) -> dict[str, JsonValue]:
        """The event as a CloudEvents 1.0 object."""
        data: dict[str, JsonValue] = {"attempt": self.attempt, "sequence": self.sequence, **self.data}
        return {
            "specversion": "1.0",
            "id": f"{self.job}/{self.sequence}" if self.job and self.kind != "gap" else f"gap/{self.cursor}",
            "source": SOURCE,
            "type": TYPE_PREFIX + self.kind,
            "subject": self.job,
            "time": self.time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "datacontenttype": "application/json",
            "data": {"job": self.job, **data},
        }

    def to_json(self) -> str:
        return json.dumps(self.cloud(), separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class _Range:
    """Entries from an id on, without waiting."""

    key: str
    start: str


@dataclass(frozen=True, slots=True)
class _Read:
    """Entries behind an id, waiting for some time when there are none."""

    key: str
    after: str


_Ask = _Range | _Read | Op[JobRecord | None] | Op[dict[State, int]]
_Steps = Generator["Event | _Ask", object, None]


class _Reading:
    """A place in a stream, and what must come next for nothing to be missing."""

    def __init__(self, ops: Ops, settings: JobSettings, record: JobRecord | None, run: str | None) -> None:
        self.ops = ops
        self.job = record.id if record else None
        self.run = run or (record.job.run if record else None)
        name = f"run:{self.run}" if self.run else f"job:{self.job}"
        self.key = f"{settings.key_prefix}events:{name}"
        self.cursor = "0-0"
        if self.job and self.run and record:  # nothing of this job is further back in the run's stream
            self.cursor = f"{micros(record.times.submitted) // 1000 - 1}-0"
        self.expected: int | None = 1  # the next sequence of the job, or number of the run; None: any

    def events(self, entries: list[Entry]) -> Iterator[tuple[Event, int]]:
        """The wanted events of a page, each with how many are missing before it."""
        for cursor, fields in entries:
            self.cursor = cursor
            job = fields.get("job") or self.job
            if self.job and job != self.job:
                continue
            place = int(fields["sequence" if self.job else "number"])
            missed = place - self.expected if self.expected is not None else 0
            self.expected = place + 1
            data = json.loads(fields["data"]) if fields["data"] else {}
            kind = cast("Kind", fields["type"])
            yield Event(cursor, kind, job, int(fields["attempt"]), int(fields["sequence"]), data), missed

    def gap(self, missed: int | None) -> _Steps:
        """Tells the reader, with the state of things as it is now."""
        snapshot: dict[str, JsonValue]
        if self.job:
            record = cast("JobRecord | None", (yield self.ops.get(self.job)))
            left_out = {"job", "extras", "digest", "put", "position"}
            snapshot = record.model_dump(mode="json", exclude=left_out) if record else {"state": None}
            attempt = record.attempt if record else 0
        else:
            snapshot = cast("dict[str, JsonValue]", (yield self.ops.counts(self.run)))
            attempt = 0
        data: dict[str, JsonValue] = {"missed": missed, "snapshot": snapshot}
        yield Event(self.cursor, "gap", self.job, attempt, 0, data)


def _follow(
    ops: Ops,
    settings: JobSettings,
    job_id: str | None,
    *,
    run: str | None,
    after: str | None,
    look_on: bool,
) -> _Steps:
    """What to ask and what to tell, in order. Ends behind the terminal event of a job."""
    if (job_id is None) == (run is None):
        raise ValueError("events are those of a job or of a run: give one of job_id and run")
    if run is not None:
        check_id(run)  # of no such run an event will ever come
    record = cast("JobRecord | None", (yield ops.get(job_id))) if job_id is not None else None
    if job_id is not None and record is None:
        raise UnknownJob(job_id)
    place = _Reading(ops, settings, record, run)
    if after is not None:
        yield from _resume(place, after)
    waiting = over = False
    while True:
        ask = _Read(place.key, place.cursor) if waiting else _Range(place.key, f"({place.cursor}")
        entries = cast("list[Entry]", (yield ask))
        last: Event | None = None
        for event, missed in place.events(entries):
            if missed > 0:
                yield from place.gap(missed)
            yield event
            last = event
        if job_id and last and last.ended and (yield from _is_over(ops, job_id)):
            return
        if len(entries) == PAGE:
            waiting = False
        elif over or not look_on:
            if job_id and (over or place.expected == 1):  # the stream does not say what the record says
                yield from place.gap(None)
            return
        else:  # the record is looked at between two reads: a stream may have expired
            over = waiting and not entries and job_id is not None and (yield from _is_over(ops, job_id))
            waiting = not over


def _resume(place: _Reading, after: str) -> _Steps:
    """Goes on behind a known event. When that one is no longer there, neither may be its successors."""
    entries = cast("list[Entry]", (yield _Range(place.key, after)))
    place.expected = None
    if entries and entries[0][0] == after:
        for _event, _ in place.events(entries[:1]):
            pass
        place.cursor = after
        return
    place.cursor = after
    yield from place.gap(None)


def _is_over(ops: Ops, job_id: str) -> Generator[Event | _Ask, object, bool]:
    """A terminal event is the last one unless the job was retried after it."""
    record = cast("JobRecord | None", (yield ops.get(job_id)))
    return record is None or record.ended


class Events:
    """The reader for ordinary code."""

    def __init__(self, runner: Runner, settings: JobSettings) -> None:
        self._runner, self._settings, self._ops = runner, settings, Ops(settings)

    def replay(
        self, job_id: str | None = None, *, run: str | None = None, after: str | None = None
    ) -> Iterator[Event]:
        """What has happened so far to a job, or in a run. Raises UnknownJob, InvalidJob."""
        steps = _follow(self._ops, self._settings, job_id, run=run, after=after, look_on=False)
        return self._drive(steps, None)

    def follow(
        self,
        job_id: str | None = None,
        *,
        run: str | None = None,
        after: str | None = None,
        idle_s: float | None = None,
    ) -> Iterator[Event]:
        """What has happened and what happens, until the job's terminal event; for a run until the caller
        stops. Ends early when nothing comes for `idle_s` seconds. Raises UnknownJob, InvalidJob."""
        steps = _follow(self._ops, self._settings, job_id, run=run, after=after, look_on=True)
        return self._drive(steps, idle_s)

    def _drive(self, steps: _Steps, idle_s: float | None) -> Iterator[Event]:
        reply: object = None
        patience = _Patience(idle_s)
        while (step := _next(steps, reply)) is not None:
            reply = None
            if isinstance(step, Event):
                yield step
                patience.renew()
            elif isinstance(step, _Range):
                reply = self._runner.client.xrange(step.key, step.start, "+", count=PAGE)
            elif isinstance(step, _Read):
                if patience.over():
                    return
                found = self._runner.client.xread({step.key: step.after}, PAGE, patience.block_ms())
                reply = _entries(found)
            else:
                reply = self._runner.run(step)


class AsyncEvents:
    """The same for asyncio."""

    def __init__(self, runner: AsyncRunner, settings: JobSettings) -> None:
        self._runner, self._settings, self._ops = runner, settings, Ops(settings)

    def replay(
        self, job_id: str | None = None, *, run: str | None = None, after: str | None = None
    ) -> AsyncIterator[Event]:
        """As Events.replay."""
        steps = _follow(self._ops, self._settings, job_id, run=run, after=after, look_on=False)
        return self._drive(steps, None)

    def follow(
        self,
        job_id: str | None = None,
        *,
        run: str | None = None,
        after: str | None = None,
        idle_s: float | None = None,
    ) -> AsyncIterator[Event]:
        """As Events.follow."""
        steps = _follow(self._ops, self._settings, job_id, run=run, after=after, look_on=True)
        return self._drive(steps, idle_s)

    async def _drive(self, steps: _Steps, idle_s: float | None) -> AsyncIterator[Event]:
        reply: object = None
        patience = _Patience(idle_s)
        while (step := _next(steps, reply)) is not None:
            reply = None
            if isinstance(step, Event):
                yield step
                patience.renew()
            elif isinstance(step, _Range):
                reply = await self._runner.client.xrange(step.key, step.start, "+", count=PAGE)
            elif isinstance(step, _Read):
                if patience.over():
                    return
                found = await self._runner.client.xread({step.key: step.after}, PAGE, patience.block_ms())
                reply = _entries(found)
            else:
                reply = await self._runner.run(step)


class _Patience:
    """How long a reader without news waits."""

    def __init__(self, idle_s: float | None) -> None:
        self._idle_s = idle_s
        self.renew()

    def renew(self) -> None:
        self._until = None if self._idle_s is None else time.monotonic() + self._idle_s

    def over(self) -> bool:
        return self._until is not None and time.monotonic() >= self._until

    def block_ms(self) -> int:
        left = BLOCK_MS if self._until is None else int((self._until - time.monotonic()) * 1000)
        return max(1, min(BLOCK_MS, left))


def _next(steps: _Steps, reply: object) -> Event | _Ask | None:
    try:
        return steps.send(reply)
    except StopIteration:
        return None


def _entries(found: object) -> list[Entry]:
    """Of XREAD over one stream."""
    streams = cast("list[tuple[str, list[Entry]]]", found)
    return streams[0][1] if streams else []
