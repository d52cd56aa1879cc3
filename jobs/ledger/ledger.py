"""The ledger: what has become of every job, one atomic script for each transition, on Redis's clock.

Fencing: `start` gives an attempt number; whatever an attempt reports later counts only while it is the
current one. A method that answers "fenced" has changed nothing: the caller drops the attempt.

Errors of the connection (redis.RedisError) pass through: every call may be made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, Unpack, cast
from uuid import uuid4

from saggar.jobs.cards import ModelCard
from saggar.jobs.lanes.script import knows_flags
from saggar.jobs.ledger import parse
from saggar.jobs.ledger.message import job_message, micros
from saggar.jobs.ledger.ops import Criteria, Data, EventKind, Ops
from saggar.jobs.ledger.script import LEDGER_SCRIPTS, Op, Reply, Scripts
from saggar.jobs.record import JobError, JobRecord, JobResult, State
from saggar.jobs.schema import Job

if TYPE_CHECKING:
    import redis
    from saggar.jobs.lanes import LaneMessage
    from saggar.jobs.settings import JobSettings

T = TypeVar("T")


class Runner:
    """Runs operations over one client: by hash, and by text where the server does not have it yet."""

    def __init__(self, client: redis.Redis, settings: JobSettings, folder: Path = LEDGER_SCRIPTS) -> None:
        """`folder`: where the scripts of the operations are."""
        self.client = client
        self._settings = settings
        self._folder = folder
        self._known: Scripts | None = None

    @property
    def _scripts(self) -> Scripts:
        from redis import ResponseError

        if self._known is None:
            try:
                info = cast("dict[str, object]", self.client.info("server"))
            except ResponseError:  # a stand-in without INFO
                info = {}
            self._known = Scripts(self._settings, knows_flags=knows_flags(info), folder=self._folder)
        return self._known

    def run(self, op: Op[T]) -> T:
        """Raises what the operation's reader raises, what the operation makes of a full server, and
        redis.RedisError."""
        from redis.exceptions import NoScriptError, OutOfMemoryError

        scripts = self._scripts
        try:
            try:
                reply = self.client.evalsha(scripts.hashes[op.script], 0, *op.args)
            except NoScriptError:
                reply = self.client.eval(scripts.texts[op.script], 0, *op.args)
        except OutOfMemoryError as full:
            raise (op.when_full or full) from full
        return op.parse(cast("Reply", reply))

    def run_many(self, ops: Sequence[Op[T]]) -> list[T | Exception]:
        """All in one round trip; in two where the server does not know a script yet. What an operation's reader
        raises stands in its place; errors of the connection are raised, and the whole may be run again."""
        from redis.exceptions import NoScriptError

        scripts = self._scripts
        pipe = self.client.pipeline(transaction=False)
        for op in ops:
            pipe.evalsha(scripts.hashes[op.script], 0, *op.args)
        replies = cast("list[Reply | Exception]", pipe.execute(raise_on_error=False))
        unknown = [index for index, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        for index in unknown:
            pipe.eval(scripts.texts[ops[index].script], 0, *ops[index].args)
        for index, reply in zip(unknown, pipe.execute(raise_on_error=False), strict=True):
            replies[index] = reply
        return [outcome(op, reply) for op, reply in zip(ops, replies, strict=True)]


def outcome(op: Op[T], reply: Reply | Exception) -> T | Exception:
    """The operation's value, or the error that stands for it."""
    from redis.exceptions import OutOfMemoryError
    from saggar.jobs.errors import SaggarError

    if isinstance(reply, Exception):
        return op.when_full or reply if isinstance(reply, OutOfMemoryError) else reply
    try:
        return op.parse(reply)
    except SaggarError as error:
        return error


class Ledger:
    """The record of all jobs, over one Redis client that answers in text (`settings.connect`)."""

    def __init__(self, client: redis.Redis, settings: JobSettings) -> None:
        self.ops = Ops(settings)
        self.runner = Runner(client, settings)
        self._run = self.runner.run

    def submit(self, job: Job, message: LaneMessage, digest: str, extras: str = "") -> parse.Submitted:
        """Accepts a checked job: record, message and `submitted` event at once. The same id or idempotency
        key with the same digest is the same job. `digest` is of the job as it was asked for.

        Raises Conflict, QueueFull, InvalidJob (a deadline that is over).
        """
        return self._run(self.ops.submit(job, message, digest, extras))

    def start(
        self, job_id: str, owner: str, token: str | None = None, put: int = 1
    ) -> parse.Started | parse.NotStarted:
        """Takes a delivered job up. `token` names the delivery (a second call with it gets the same attempt);
        `put` is the message's number: from its header, 1 when it has none. A job whose spec cannot be read, of a
        newer producer perhaps, fails here."""
        answer = self._run(self.ops.start(job_id, owner, token or uuid4().hex, put))
        if isinstance(answer, parse.Unreadable):
            error = JobError(kind="unreadable", message=answer.why)
            self.fail(job_id, answer.attempt, error)
            return parse.NotStarted("unreadable", "failed", error)
        return answer

    def progress(
        self,
        job_id: str,
        attempt: int,
        step: int,
        steps: int,
        *,
        kind: EventKind = "progress",
        data: Data | None = None,
    ) -> parse.Orders:
        """Records where the attempt is; `kind` "" without an event. The caller keeps to two a second. Marks
        the attempt as executing: call it with step 0 when the engine begins."""
        return self._run(self.ops.progress(job_id, attempt, step, steps, kind=kind, data=data or {}))

    def check(self, attempts: Sequence[tuple[str, int]]) -> dict[str, parse.Orders]:
        """What running attempts (id, attempt) shall do: go on, stop, or drop what they do."""
        return self._run(self.ops.check(attempts)) if attempts else {}

    def requeue(self, job_id: str, attempt: int, reason: str = "drained") -> bool:
        """The attempt is given back, its message by the transport. False: fenced."""
        return self._run(self.ops.requeue(job_id, attempt, reason))

    def disown(self, job_id: str, attempt: int) -> bool:
        """The attempt died, its worker lives: the next start counts a suspicion, whoever makes it. False: fenced."""
        return self._run(self.ops.disown(job_id, attempt))

    def retry(
        self,
        job_id: str,
        attempt: int,
        error: JobError,
        card: ModelCard | None = None,
        not_before: datetime | None = None,
        *,
        job: Job | None = None,
        delay_s: float = 0.0,
        alone: bool = False,
        suspicions: int = 0,
    ) -> bool:
        """Another attempt under a new message at the job's old place, not before a time, or not before
        `delay_s` from now on Redis's clock; `alone`: under a batch key of its own. `job`: as the card completes
        it, for one that was queued without; its message then waits under the key the worker compares with, and
        the record keeps it, with so many `suspicions` more. The caller acknowledges the old message. False:
        fenced. A job that shall stop ends here."""
        record = self.get(job_id)
        if record is None:
            return False
        put = record.put + (0 if record.state == "queued" else 1)  # queued: this very call was sent before
        eta_us = micros(not_before)
        job = job or record.job
        message = job_message(job, card, put=put, extras=record.extras, eta_us=eta_us, alone=alone)
        data: Data = {"kind": error.kind, "message": error.message}
        return self._run(self.ops.retry(job, attempt, message, put, data, delay_s, suspicions))

    def commit(self, job_id: str, attempt: int, result: JobResult) -> parse.Ending:
        """Success: result, terminal event and Celery's result at once. Only for the current attempt."""
        return self._run(self.ops.commit(job_id, attempt, result))

    def fail(self, job_id: str, attempt: int, error: JobError, *, dead: bool = False) -> parse.Ending:
        """Failure for good. `dead` also puts it among the dead, for somebody to look at."""
        return self._run(self.ops.fail(job_id, attempt, error, dead))

    def bury(self, job_id: str, error: JobError) -> parse.Ending:
        """Failure of whatever attempt there is, or none: its message has become a dead letter, and goes. The job
        lives on when there is no such letter (any more), or another message."""
        return self._run(self.ops.fail(job_id, None, error, True))

    def give_up(self, job_id: str, error: JobError) -> parse.Ending:
        """Failure of whatever attempt there is, or none: nobody could do this job."""
        return self._run(self.ops.fail(job_id, None, error, False))

    def stopped(self, job_id: str, attempt: int) -> parse.Ending:
        """The attempt has stopped because it was told to: cancelled, or expired if that was the reason."""
        return self._run(self.ops.stopped(job_id, attempt, "cancelled"))

    def expire(self, job_id: str, attempt: int) -> parse.Ending:
        """The attempt has stopped because its deadline is over."""
        return self._run(self.ops.stopped(job_id, attempt, "expired"))

    def cancel(self, job_id: str) -> parse.Cancelled:
        """A waiting job ends at once. A running one is told to stop: durably, and by a message on the
        channel `cancel_channel`. An unknown id is remembered."""
        return self._run(self.ops.cancel(job_id))

    def expire_due(self, most: int = 500) -> int:
        """Ends waiting jobs whose deadline is over, tells running ones to stop. How many."""
        return self._run(self.ops.expire(most))

    def prune(self, most: int = 500) -> int:
        """Forgets records that are older than they are kept for. How many."""
        return self._run(self.ops.prune(most))

    def counts(self, run: str | None = None) -> dict[State, int]:
        """Known jobs by state: all, or those of a run (which costs a look at each of them)."""
        return self._run(self.ops.counts(run))

    def get(self, job_id: str) -> JobRecord | None:
        """None: unknown, which is never the same as done."""
        return self._run(self.ops.get(job_id))

    def list(self, **criteria: Unpack[Criteria]) -> parse.Page:
        """A page of the jobs that match all criteria. Raises InvalidJob."""
        return self._run(self.ops.list(criteria))


def cancel_channel(settings: JobSettings) -> str:
    """The pub/sub channel that carries the ids of running jobs that shall stop."""
    return settings.key_prefix + "cancel"
