"""One job from its message to its record: start → engine → encode → spool → store → commit.

The order is what makes a job seen once: objects first, then `result.json` (whoever makes it has won), then the ledger's
record with its terminal event. Everything here may run twice; only one of them is seen. The line (line.py) takes many
jobs through these steps at once; what a step has to wait for runs in a thread of the job's own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn, Protocol, TypeVar

import redis
from redis.exceptions import OutOfMemoryError, ReadOnlyError
from saggar.engine import errors as engine_errors
from saggar.engine.handle import Handle, Reservation
from saggar.engine.live import OnEvent
from saggar.engine.request import Output, Request
from saggar.jobs.cards import ModelCard, batch_key, check_job
from saggar.jobs.errors import InvalidJob, JobFailed
from saggar.jobs.ledger import Ledger, NotStarted, Started, alone_key
from saggar.jobs.record import JobError, JobResult
from saggar.jobs.schema import Job
from saggar.storage.errors import Conflict, InvalidKey, StorageRefused, StorageUnavailable
from saggar.workers.attempts import Attempt, Attempts
from saggar.workers.delivery import Delivery
from saggar.workers.encode import UnfitFormat
from saggar.workers.inputs.decoders import Stopped
from saggar.workers.inputs.fetch import Ticket
from saggar.workers.inputs.hold import Files
from saggar.workers.inputs.load import InputLoader, Inputs, InputUnavailable
from saggar.workers.publish import Publisher, Upload
from saggar.workers.translate import to_request

log = logging.getLogger(__name__)
T = TypeVar("T")
_REDIS_PAUSE_S = 0.5
_LOOK_S = 0.1
ALONE_AFTER = 2
"""Crashes while executing after which a job runs alone; one more, and it is a dead letter."""
_RETRY_PAUSE_S = 1.0


class Dropped(Exception):
    """Nothing to do for this message, or no longer: acknowledge it, its job's record stands elsewhere."""


class GivenBack(Exception):
    """Somebody else must do this job: its message goes back to its lane."""


class Failed(Exception):
    """The job is at fault: its record says `error`. `dead`: and it is set aside for somebody to look at."""

    def __init__(self, kind: str, message: str, *, dead: bool = False) -> None:
        super().__init__(message)
        self.error = JobError(kind=kind, message=message[:4000])
        self.dead = dead


class Serving(Protocol):
    """The part of the engine that a service uses."""

    def submit(
        self, request: Request, *, reservation: Reservation | None = None, on_event: OnEvent | None = None
    ) -> Handle: ...


class Service:
    """What a worker does with a job. `on_engine_lost` is called when the engine will serve nothing any more."""

    def __init__(
        self,
        ledger: Ledger,
        attempts: Attempts,
        engine: Serving,
        publisher: Publisher,
        card: ModelCard,
        owner: str,
        on_engine_lost: Callable[[], None],
        inputs: InputLoader,
    ) -> None:
        self._ledger = ledger
        self._attempts = attempts
        self._engine = engine
        self._publisher = publisher
        self._card = card
        self._owner = owner
        self._on_engine_lost = on_engine_lost
        self.files = Files(inputs)
        self._stop = threading.Event()

    def run(
        self,
        job_id: str,
        token: str,
        put: int = 1,
        key: str | None = None,
        reservation: Reservation | None = None,
    ) -> JobResult:
        """Does one delivered job. `token` names the delivery, `put` and `key` the message it came with and the batch
        key under which it waited.

        Raises JobFailed (its record says so), Dropped or GivenBack.
        """
        started = self._insist(lambda: self._ledger.start(job_id, self._owner, token, put), None)
        return self.go_on(Delivery(job_id, token, put, key, reservation), started)

    def start_all(self, deliveries: Sequence[Delivery]) -> Sequence[object]:
        """What the ledger answers to the start of each, in one round trip. Raises redis.RedisError."""
        ops = self._ledger.ops
        return self._ledger.runner.run_many(
            [ops.start(one.job_id, self._owner, one.token, one.put) for one in deliveries]
        )

    def go_on(self, delivery: Delivery, started: Started | NotStarted) -> JobResult:
        """As `run`, of a job that has been taken up."""
        if isinstance(started, NotStarted):
            return self._not_started(delivery.job_id, started)
        attempt = self.admit(delivery, started)
        return self.to_its_end(attempt, lambda: self.attempt(delivery, started, attempt))

    def admit(self, delivery: Delivery, started: Started) -> Attempt:
        """The attempt, in hand from now on: whoever calls sees it through `to_its_end`."""
        attempt = Attempt(delivery.job_id, started.attempt, delivery.token, suspicions=started.suspicions)
        self._attempts.add(attempt)
        return attempt

    def to_its_end(self, attempt: Attempt, rest: Callable[[], JobResult]) -> JobResult:
        """Does the rest of an attempt, whose failure is the job's. Raises as `run`."""
        try:
            return self._in_our_words(rest, attempt)
        except Failed as failure:
            raise self._failed(failure, attempt) from failure
        except (Dropped, GivenBack, redis.RedisError):
            raise
        except Exception as error:  # an error of ours: without an end the job would come back for ever
            log.exception(
                "%s: attempt %d failed in a way that was not foreseen", attempt.job_id, attempt.number
            )
            raise self._failed(Failed("internal", f"{type(error).__name__}: {error}"), attempt) from error
        finally:
            self._attempts.remove(attempt)

    def attempt(self, delivery: Delivery, started: Started, attempt: Attempt) -> JobResult:
        """The whole of an attempt."""
        checked = self._checked(started.job)
        if attempt.number > 1 and (found := self._find(checked, attempt)):
            return self.commit(attempt, found)
        if started.stopping:
            raise self._ended(attempt)
        self._placed(checked, started, attempt, delivery.key)
        if attempt.suspicions >= ALONE_AFTER:
            self._wait_for_an_empty_engine(attempt)
        seat = delivery.reservation
        return self.finish(checked, attempt, lambda: self._generate(checked, attempt, seat))

    def plain(self, delivery: Delivery, started: Started) -> Job | None:
        """The checked job, where nothing speaks against it; None: `attempt` says what there is to do."""
        if started.attempt > 1 or started.stopping or started.suspicions:
            return None
        try:
            job = check_job(started.job, self._card)
        except InvalidJob:
            return None
        return job if delivery.key in (None, batch_key(job, self._card)) else None

    def enter(self, job: Job, attempt: Attempt, reservation: Reservation | None, inputs: Inputs) -> Handle:
        """The job's place in the engine. Raises EngineError."""
        handle = self._engine.submit(
            # A job may be here twice: fenced, and again. The engine must be able to tell them apart.
            replace(
                to_request(job, inputs),
                id=f"{job.id}/a{attempt.number}",
                suspect=attempt.suspicions >= ALONE_AFTER,
            ),
            reservation=reservation,
            on_event=self._attempts.listener(attempt),
        )
        attempt.take(handle)
        if reservation is not None:
            reservation.release()  # it may have been for more rows than these
        return handle

    def enter_with_files(
        self, job: Job, attempt: Attempt, reservation: Reservation | None, ticket: Ticket
    ) -> Handle:
        """As `enter`, with the job's files, fetched first. Raises as `InputLoader.held` too."""
        return self.files.entered(job, ticket, lambda inputs: self.enter(job, attempt, reservation, inputs))

    def finish(self, job: Job, attempt: Attempt, made: Callable[[], Output]) -> JobResult:
        """From the engine on, whose output or error `made` says."""
        return self._publish(job, attempt, self._output(job, attempt, made))

    def close(self) -> None:
        """Ends every wait for a Redis that does not answer."""
        self._stop.set()

    def _not_started(self, job_id: str, answer: NotStarted) -> JobResult:
        """A message that came once more after its job's end, before it was acknowledged: say again what became of it,
        for whoever is linked to it."""
        if answer.error is not None:
            raise JobFailed(f"{answer.error.kind}: {answer.error.message}")
        if answer.state in ("succeeded", "failed"):
            record = self._insist(lambda: self._ledger.get(job_id), None)
            if record is not None and record.result is not None:
                return record.result
            if record is not None and record.error is not None:
                raise JobFailed(f"{record.error.kind}: {record.error.message}")
        raise Dropped(f"{job_id}: {answer.state or answer.reason}")

    def _failed(self, failure: Failed, attempt: Attempt) -> JobFailed:
        error = failure.error
        self._insist(
            lambda: self._ledger.fail(attempt.job_id, attempt.number, error, dead=failure.dead), attempt
        )
        return JobFailed(f"{error.kind}: {error.message}")

    def _checked(self, job: Job) -> Job:
        """The job against this model's card, for it may have been queued before there was one."""
        try:
            return check_job(job, self._card)
        except InvalidJob as error:
            raise Failed("invalid", str(error)) from error

    def _in_our_words(self, rest: Callable[[], JobResult], attempt: Attempt) -> JobResult:
        try:
            return rest()
        except (engine_errors.InvalidRequest, InvalidKey, UnfitFormat) as error:
            raise Failed("invalid", str(error)) from error
        except (StorageRefused, Conflict) as error:
            raise Failed("storage", str(error)) from error
        except StorageUnavailable as error:  # raised only once nobody wants the result any more
            raise self._ended(attempt) from error

    def _find(self, job: Job, attempt: Attempt) -> JobResult | None:
        """What an earlier attempt has left whole in the store."""
        return self._store(lambda: self._publisher.find(job), attempt)

    def _placed(self, job: Job, started: Started, attempt: Attempt, key: str | None) -> None:
        """Whether it came by the right message. Dropped when it gets another one: a job whose worker has just died
        waits a moment, after the second time under a key of its own; one queued without a card waits under its key.
        """
        crashes = started.suspicions
        if crashes > ALONE_AFTER:
            raise Failed("worker_died", f"its worker died {crashes} times while executing it", dead=True)
        alone = crashes >= ALONE_AFTER
        place = alone_key(job.id) if alone else batch_key(job, self._card)
        if started.crashed:
            why = JobError(kind="worker_died", message="its worker died while executing it")
            self._again(job, attempt, why, _pause_s(crashes), alone)
        if key is not None and key != place:
            why = JobError(kind="rekeyed", message="waits under another batch key")
            self._again(job, attempt, why, 0.0, alone)

    def _again(
        self, job: Job, attempt: Attempt, why: JobError, delay_s: float, alone: bool, suspicions: int = 0
    ) -> NoReturn:
        """`job`: checked, so that its next message waits under the key that `_placed` looks for."""
        self._insist(
            lambda: self._ledger.retry(
                attempt.job_id,
                attempt.number,
                why,
                self._card,
                job=job,
                delay_s=delay_s,
                alone=alone,
                suspicions=suspicions,
            ),
            attempt,
        )
        raise Dropped(f"{attempt.job_id}: has another message now")

    def _store(self, call: Callable[[], T], attempt: Attempt) -> T:
        """Calls the store until it answers. Raises StorageUnavailable once nobody wants the result any more."""
        return self._publisher.patience.call(call, lambda: attempt.wanted, attempt.over)

    def _wait_for_an_empty_engine(self, attempt: Attempt) -> None:
        """The appetite fetches nothing beside a suspect; what was fetched before it goes first."""
        while self._attempts.busy_beside(attempt):
            if attempt.drained or attempt.over.wait(_LOOK_S):
                raise self._ended(attempt)

    def _generate(self, job: Job, attempt: Attempt, reservation: Reservation | None) -> Output:
        if not job.has_inputs:
            return self.enter(job, attempt, reservation, {}).result()
        ticket = Ticket()
        self.files.expect(attempt, ticket, reservation)
        return self.enter_with_files(job, attempt, reservation, ticket).result()

    def _output(self, job: Job, attempt: Attempt, made: Callable[[], Output]) -> Output:
        try:
            return made()
        except InvalidJob as error:  # a file that is not what it should be
            raise Failed("invalid", str(error)) from error
        except InputUnavailable as error:
            raise Failed("input_unavailable", str(error)) from error
        except (engine_errors.Cancelled, Stopped) as error:
            raise self._ended(attempt) from error
        except engine_errors.DeadlineExceeded as error:
            self._insist(lambda: self._ledger.expire(attempt.job_id, attempt.number), attempt)
            raise Dropped(f"{attempt.job_id}: deadline") from error
        except engine_errors.OutOfMemory as error:
            raise Failed("out_of_memory", str(error)) from error
        except engine_errors.RowFailed as error:
            raise Failed("row_failed", str(error)) from error
        except engine_errors.InvalidRequest:
            raise
        except engine_errors.WorkerDied as error:
            if not attempt.starts:
                raise self._engine_lost(attempt) from error
            self._on_engine_lost()
            self._suspect(job, attempt, str(error))
        except engine_errors.EngineError as error:  # EngineClosed, or its loop has failed
            raise self._engine_lost(attempt) from error

    def _publish(self, job: Job, attempt: Attempt, output: Output) -> JobResult:
        self._attempts.uploading(attempt)
        upload = self._publisher.upload(
            job, attempt.number, output, lambda: attempt.wanted, stop=attempt.over
        )
        try:
            return self.seal(attempt, upload)
        finally:
            self._publisher.forget(upload)

    def seal(self, attempt: Attempt, upload: Upload) -> JobResult:
        """Manifest and record of what is in the store."""
        if not attempt.wanted:
            raise self._ended(attempt)
        if self._publisher.storage.conditional_put:
            return self.commit(attempt, self._store(lambda: self._publisher.commit(upload), attempt))
        # This store cannot say who came first, so the ledger does.
        result = self.commit(attempt, self._publisher.result(upload.manifest, upload.key))
        self._store(lambda: self._publisher.commit(upload), attempt)
        return result

    def commit(self, attempt: Attempt, result: JobResult) -> JobResult:
        """The record of a result whose manifest stands."""
        ending = self._insist(lambda: self._ledger.commit(attempt.job_id, attempt.number, result), attempt)
        if not ending.won:
            raise Dropped(f"{attempt.job_id}: attempt {attempt.number} came too late ({ending.state})")
        return result

    def _ended(self, attempt: Attempt) -> Exception:
        """What a request that was stopped means for its message."""
        if attempt.drained:
            self._insist(lambda: self._ledger.requeue(attempt.job_id, attempt.number), attempt)
            return GivenBack(attempt.job_id)
        self._insist(lambda: self._ledger.stopped(attempt.job_id, attempt.number), attempt)
        return Dropped(f"{attempt.job_id}: stopped")

    def _engine_lost(self, attempt: Attempt) -> Exception:
        self._on_engine_lost()
        if attempt.phase == "waiting":
            self._insist(lambda: self._ledger.requeue(attempt.job_id, attempt.number, "engine died"), attempt)
        else:  # it stays "running", and the next start counts a suspicion
            self._insist(lambda: self._ledger.disown(attempt.job_id, attempt.number), attempt)
        return GivenBack(attempt.job_id)

    def _suspect(self, job: Job, attempt: Attempt, reason: str) -> NoReturn:
        """The engine's ranks died each time that it began. As many crashes as if workers had died of it."""
        crashes = attempt.suspicions + attempt.starts
        why = JobError(kind="worker_died", message=f"the ranks died while executing it: {reason}"[:4000])
        self._again(job, attempt, why, _pause_s(crashes), crashes >= ALONE_AFTER, attempt.starts)

    def _insist(self, call: Callable[[], T], attempt: Attempt | None) -> T:
        """Calls the ledger until it answers, for as long as the attempt is wanted.

        Raises GivenBack when the worker stops first.
        """
        while True:
            try:
                return call()
            except redis.RedisError as error:
                if not _passes(error):
                    raise
                if self._stop.wait(_REDIS_PAUSE_S) or not (attempt is None or attempt.wanted):
                    raise GivenBack("the ledger does not answer") from error


def _pause_s(crashes: int) -> float:
    """Before the next attempt of a job in whose hands so many workers or ranks died."""
    return float(_RETRY_PAUSE_S * 2 ** (crashes - 1))


def _passes(error: redis.RedisError) -> bool:
    """Whether Redis may answer later: it is away, full, cannot write its file, or is a replica at this moment."""
    away = redis.ConnectionError | redis.TimeoutError | OutOfMemoryError | ReadOnlyError
    return isinstance(error, away) or str(error).startswith(("MISCONF", "NOREPLICAS", "BUSY"))
