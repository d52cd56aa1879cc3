"""One job from its message to its record: start → engine → encode → spool → store → commit.

The order is what makes a job seen once: objects first, then `result.json` (whoever makes it has won), then the ledger's
record with its terminal event. Everything here may run twice; only one of them is seen. It runs in a thread of the
Celery worker, one thread for each job in hand.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

import redis
from saggar.engine import errors as engine_errors
from saggar.engine.handle import Handle, Reservation
from saggar.engine.live import OnEvent
from saggar.engine.request import Output, Request
from saggar.jobs.cards import ModelCard, batch_key, check_job
from saggar.jobs.errors import InvalidJob, JobFailed
from saggar.jobs.ledger import Ledger, NotStarted
from saggar.jobs.record import JobError, JobResult
from saggar.jobs.schema import Job
from saggar.storage.errors import Conflict, InvalidKey, StorageRefused, StorageUnavailable
from saggar.workers.attempts import Attempt, Attempts
from saggar.workers.publish import Publisher
from saggar.workers.translate import to_request

log = logging.getLogger(__name__)
T = TypeVar("T")
_REDIS_PAUSE_S = 0.5


class Dropped(Exception):
    """Nothing to do for this message, or no longer: acknowledge it, its job's record stands elsewhere."""


class GivenBack(Exception):
    """Somebody else must do this job: its message goes back to its lane."""


class Failed(Exception):
    """The job is at fault: its record says `error`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.error = JobError(kind=kind, message=message[:4000])


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
    ) -> None:
        self._ledger = ledger
        self._attempts = attempts
        self._engine = engine
        self._publisher = publisher
        self._card = card
        self._owner = owner
        self._on_engine_lost = on_engine_lost
        self._stop = threading.Event()

    def run(
        self,
        job_id: str,
        token: str,
        put: int | None = None,
        key: str | None = None,
        reservation: Reservation | None = None,
    ) -> JobResult:
        """Does one delivered job. `token` names the delivery, `put` and `key` the message it came with and the batch
        key under which it waited.

        Raises JobFailed (its record says so), Dropped or GivenBack.
        """
        started = self._insist(lambda: self._ledger.start(job_id, self._owner, token, put), None)
        if isinstance(started, NotStarted):
            return self._not_started(job_id, started)
        attempt = Attempt(job_id, started.attempt, token)
        self._attempts.add(attempt)
        try:
            checked = self._checked(started.job, attempt, key)
            return self._attempt(checked, attempt, reservation)
        except Failed as failure:
            error = failure.error
            self._insist(lambda: self._ledger.fail(job_id, attempt.number, error), attempt)
            raise JobFailed(f"{error.kind}: {error.message}") from failure
        finally:
            self._attempts.remove(attempt)

    def close(self) -> None:
        """Ends every wait for a Redis that does not answer."""
        self._stop.set()

    def _not_started(self, job_id: str, answer: NotStarted) -> JobResult:
        """A message that came once more after its job's end, before it was acknowledged: say again what became of it,
        for whoever is linked to it."""
        if answer.state in ("succeeded", "failed"):
            record = self._insist(lambda: self._ledger.get(job_id), None)
            if record is not None and record.result is not None:
                return record.result
            if record is not None and record.error is not None:
                raise JobFailed(f"{record.error.kind}: {record.error.message}")
        raise Dropped(f"{job_id}: {answer.state or answer.reason}")

    def _checked(self, job: Job, attempt: Attempt, key: str | None) -> Job:
        """The job against this model's card: one that was queued before there was a card is checked here, and goes back
        to wait among those it can run with."""
        try:
            checked = check_job(job, self._card)
        except InvalidJob as error:
            raise Failed("invalid", str(error)) from error
        if key is not None and key != batch_key(checked, self._card):
            why = JobError(kind="unserved", message="waits under its batch key now that its model has a card")
            self._insist(lambda: self._ledger.retry(job.id, attempt.number, why, self._card), attempt)
            raise Dropped(f"{job.id}: has another message now")
        return checked

    def _attempt(self, job: Job, attempt: Attempt, reservation: Reservation | None) -> JobResult:
        try:
            if attempt.number > 1 and (found := self._publisher.find(job)):
                return self._commit(attempt, found)
            output = self._generate(job, attempt, reservation)
            return self._publish(job, attempt, output)
        except (engine_errors.InvalidRequest, InvalidKey) as error:
            raise Failed("invalid", str(error)) from error
        except (StorageRefused, Conflict) as error:
            raise Failed("storage", str(error)) from error
        except StorageUnavailable as error:  # raised only once nobody wants the result any more
            raise self._ended(attempt) from error

    def _generate(self, job: Job, attempt: Attempt, reservation: Reservation | None) -> Output:
        try:
            handle = self._engine.submit(
                to_request(job), reservation=reservation, on_event=self._attempts.listener(attempt)
            )
            attempt.handle = handle
            if not attempt.wanted or attempt.drained:  # told before there was a handle to stop
                handle.cancel()
            return handle.result()
        except engine_errors.Cancelled as error:
            raise self._ended(attempt) from error
        except engine_errors.DeadlineExceeded as error:
            self._insist(lambda: self._ledger.expire(attempt.job_id, attempt.number), attempt)
            raise Dropped(f"{attempt.job_id}: deadline") from error
        except (engine_errors.WorkerDied, engine_errors.EngineClosed) as error:
            raise self._engine_lost(attempt) from error
        except engine_errors.OutOfMemory as error:
            raise Failed("out_of_memory", str(error)) from error
        except engine_errors.RowFailed as error:
            raise Failed("row_failed", str(error)) from error

    def _publish(self, job: Job, attempt: Attempt, output: Output) -> JobResult:
        self._attempts.uploading(attempt)
        upload = self._publisher.upload(job, attempt.number, output, lambda: attempt.wanted)
        try:
            if not attempt.wanted:
                raise self._ended(attempt)
            if self._publisher.storage.conditional_put:
                return self._commit(attempt, self._publisher.commit(upload))
            # This store cannot say who came first, so the ledger does.
            result = self._commit(attempt, self._publisher.result(upload.manifest, upload.key))
            self._publisher.commit(upload)
            return result
        finally:
            self._publisher.forget(upload)

    def _commit(self, attempt: Attempt, result: JobResult) -> JobResult:
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
        # A job that was executing stays "running": the next start sees that and counts a suspicion.
        return GivenBack(attempt.job_id)

    def _insist(self, call: Callable[[], T], attempt: Attempt | None) -> T:
        """Calls the ledger until it answers, for as long as the attempt is wanted.

        Raises GivenBack when the worker stops first.
        """
        while True:
            try:
                return call()
            except (redis.ConnectionError, redis.TimeoutError) as error:
                if self._stop.wait(_REDIS_PAUSE_S) or not (attempt is None or attempt.wanted):
                    raise GivenBack("the ledger does not answer") from error
