"""The ledger's operations as values: which script, which arguments, how its reply is read. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, TypedDict, cast

from pydantic import JsonValue
from saggar.jobs.errors import InvalidJob, NotRetryable, RedisFull, UnknownJob
from saggar.jobs.lanes import LaneMessage, lane_base
from saggar.jobs.ledger import parse
from saggar.jobs.ledger.message import micros
from saggar.jobs.ledger.script import Argument, Op, Reply
from saggar.jobs.record import STATES, JobError, JobRecord, JobResult, State
from saggar.jobs.schema import Job, check_id
from saggar.jobs.settings import JobSettings

PAGE_MAX = 1_000  # records of a page
LOOK_MAX = 2_000  # index entries that one page may look at
EventKind = Literal["", "progress", "uploading"]
Data = Mapping[str, JsonValue]


def compact(data: object) -> str:
    return json.dumps(data, separators=(",", ":"))


class Criteria(TypedDict, total=False):
    """Of a listing: jobs that match all of state, run, tag, tenant and dead (at least one must be given), by
    time of submit, or by time of end for a terminal state alone. `limit` records a page (100), `cursor` of
    the page before, `newest_first` (True)."""

    state: State | None
    run: str | None
    tag: str | None
    tenant: str | None
    dead: bool
    cursor: str | None
    limit: int
    newest_first: bool


class Ops:
    """The operations under these settings. All that take a job's id raise InvalidJob for one that no job can have."""

    def __init__(self, settings: JobSettings) -> None:
        self._settings = settings

    def submit(self, job: Job, message: LaneMessage, digest: str, extras: str = "") -> Op[parse.Submitted]:
        """Of a checked job. `digest` is the digest of the job as it was asked for."""
        settings = self._settings
        idem = f"{job.tenant or ''}:{job.idempotency_key}" if job.idempotency_key else ""
        quiet = "1" if job.run and job.priority == "bulk" else ""
        args: list[Argument] = [job.id, job.to_json(), digest, self._base(message.lane), message.lane]
        args += [settings.max_backlog, micros(job.deadline) or "", job.run or "", job.tenant or ""]
        args += [idem, quiet, extras, int(settings.max_backlog * settings.low_water)]
        args += [*message.args(), *job.tags]
        read = partial(parse.submitted, lane=message.lane, retry_after_s=settings.retry_after_s)
        return Op("submit", args, read, RedisFull(message.lane, settings.retry_after_s))

    def start(
        self, job_id: str, owner: str, token: str, put: int
    ) -> Op[parse.Started | parse.NotStarted | parse.Unreadable]:
        return Op("start", [check_id(job_id), owner, token, put], parse.started)

    def progress(
        self, job_id: str, attempt: int, step: int, steps: int, *, kind: EventKind, data: Data
    ) -> Op[parse.Orders]:
        more = compact({"step": step, "steps": steps, **data})
        return Op("progress", [check_id(job_id), attempt, step, steps, kind, more], parse.orders)

    def check(self, attempts: Sequence[tuple[str, int]]) -> Op[dict[str, parse.Orders]]:
        def read(reply: Reply) -> dict[str, parse.Orders]:
            answers = cast("list[parse.Orders]", parse.rows(reply))
            return {job_id: answer for (job_id, _), answer in zip(attempts, answers, strict=True)}

        args: list[Argument] = [part for job_id, attempt in attempts for part in (check_id(job_id), attempt)]
        return Op("check", args, read)

    def requeue(self, job_id: str, attempt: int, reason: str) -> Op[bool]:
        return Op(
            "requeue",
            [check_id(job_id), attempt, compact({"reason": reason})],
            lambda reply: reply != "fenced",
        )

    def disown(self, job_id: str, attempt: int) -> Op[bool]:
        return Op("disown", [check_id(job_id), attempt], lambda reply: reply != "fenced")

    def retry(
        self,
        job: Job,
        attempt: int,
        message: LaneMessage,
        put: int,
        data: Data,
        delay_s: float = 0.0,
        suspicions: int = 0,
    ) -> Op[bool]:
        """A worker's, of the checked job: the record has it from now on, and so many suspicions more."""
        args: list[Argument] = [job.id, attempt, put, self._base(message.lane), compact(data)]
        args += [round(delay_s * 1e6), job.to_json(), *message.args(), suspicions]
        return Op("retry", args, lambda reply: reply not in ("fenced", "unknown", "changed"))

    def revive(self, job: Job, message: LaneMessage, put: int) -> Op[bool]:
        """A producer's retry. A deadline that is over is dropped. False: the record changed since it was read."""
        job_id = job.id

        def read(reply: Reply) -> bool:
            if reply == "unknown":
                raise UnknownJob(job_id)
            if isinstance(reply, str) and reply.startswith("refused "):
                state = reply.removeprefix("refused ")
                raise NotRetryable(f"job {job_id} is {state} (allowed: failed, cancelled or expired)")
            return reply != "changed"

        spec = job.model_copy(update={"deadline": None}).to_json()
        return Op("retry", [job_id, "", put, self._base(message.lane), "", 0, spec, *message.args()], read)

    def commit(self, job_id: str, attempt: int, result: JobResult) -> Op[parse.Ending]:
        stored = result.model_dump_json(exclude_none=True)
        data: dict[str, JsonValue] = {
            "outputs": len({output.index for output in result.outputs}),
            "batch_id": result.batch_id,
        }
        data |= {"batch_size": result.batch_size, "manifest": result.manifest}
        if result.unread:
            data["unread"] = [one.model_dump() for one in result.unread]
        # Celery's copy is shorter: the record and the manifest have the rest, and Redis's memory is dear.
        outputs = {"__all__": {"sha256", "bytes"}}
        short = result.model_dump_json(exclude_none=True, exclude={"timings": True, "outputs": outputs})
        celery = ("SUCCESS", short)
        return self._finish(job_id, attempt, "succeeded", result=stored, celery=celery, data=data)

    def fail(self, job_id: str, attempt: int | None, error: JobError, dead: bool) -> Op[parse.Ending]:
        raised = {"exc_type": "JobFailed", "exc_message": [f"{error.kind}: {error.message}"]}
        celery = ("FAILURE", compact({**raised, "exc_module": "saggar.jobs.errors"}))
        data: Data = {"kind": error.kind, "message": error.message}
        stored = error.model_dump_json()
        return self._finish(job_id, attempt, "failed", error=stored, celery=celery, data=data, dead=dead)

    def stopped(self, job_id: str, attempt: int, state: Literal["cancelled", "expired"]) -> Op[parse.Ending]:
        return self._finish(job_id, attempt, state, celery=("REVOKED", ""), data={})

    def cancel(self, job_id: str, *, waiting_only: bool = False) -> Op[parse.Cancelled]:
        """`waiting_only`: one that runs goes on, and the answer is "requested" all the same."""
        return Op("cancel", [check_id(job_id), int(waiting_only)], parse.cancelled)

    def expire(self, most: int) -> Op[int]:
        return Op("expire", [most], lambda reply: cast("int", reply))

    def prune(self, most: int) -> Op[int]:
        return Op("prune", [most], lambda reply: cast("int", reply))

    def counts(self, run: str | None) -> Op[dict[State, int]]:
        return Op("counts", [run] if run is not None else [], parse.counts)

    def get(self, job_id: str) -> Op[JobRecord | None]:
        return Op("get", [check_id(job_id)], parse.record)

    def list(self, criteria: Criteria) -> Op[parse.Page]:
        """Raises InvalidJob for criteria that no page can have."""
        newest_first, limit = criteria.get("newest_first", True), criteria.get("limit", 100)
        cursor = criteria.get("cursor") or ""
        score, _, last = cursor.partition(":")
        if not 1 <= limit <= PAGE_MAX:
            raise InvalidJob("limit", f"{limit} is out of range", f"1 to {PAGE_MAX}")
        if cursor and not (score.isdecimal() and last):
            raise InvalidJob("cursor", "is not one that a page gave", "the cursor of the page before")
        args: list[Argument] = [int(newest_first), score, last, limit, LOOK_MAX]
        return Op("list", [*args, *_index_names(criteria)], parse.page)

    def missing(
        self, state: State, cursor: str | None, size: int
    ) -> Op[tuple[Sequence[parse.Broken], str | None]]:
        score, _, last = (cursor or ":").partition(":")
        return Op("missing", [state, score, last, size], parse.broken)

    def replace(self, job_id: str, message: LaneMessage, put: int) -> Op[bool]:
        return Op("replace", [job_id, put, self._base(message.lane), *message.args()], bool)

    def _base(self, lane: str) -> str:
        return lane_base(self._settings.key_prefix, lane)

    def _finish(
        self,
        job_id: str,
        attempt: int | None,
        state: State,
        *,
        result: str = "",
        error: str = "",
        celery: tuple[str, str],
        data: Data,
        dead: bool = False,
    ) -> Op[parse.Ending]:
        """`result` and `error` for the record, JSON; `celery`: status and result of its own."""
        more = compact({name: item for name, item in data.items() if item is not None}) if data else ""
        args: list[Argument] = [
            check_id(job_id),
            "" if attempt is None else attempt,
            state,
            result,
            error,
            *celery,
        ]
        return Op("finish", [*args, more, int(dead)], parse.ending)


def _index_names(criteria: Criteria) -> list[str]:
    """The indexes a listing goes through: the first, likely to be the shortest, is walked."""
    state = criteria.get("state")
    if state is not None and state not in STATES:
        raise InvalidJob("state", "is not one of the allowed values", ", ".join(STATES))
    wanted = {
        "run": criteria.get("run"),
        "tag": criteria.get("tag"),
        "tenant": criteria.get("tenant"),
        "state": state,
    }
    names = ["dead"] if criteria.get("dead") else []
    names += [f"{kind}:{value}" for kind, value in wanted.items() if value is not None]
    if not names:
        raise InvalidJob("criteria", "there is none", "at least one of state, run, tag, tenant, dead")
    return names
