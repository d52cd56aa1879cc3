"""Many jobs side by side without a thread for each: one thread takes them up, two publish what the engine has made,
each step for all that wait for it.

Threads that wake each other at every step of a small job cost more than the job. So the plain way of a job (its first
attempt, nothing against it, a small output for a folder of this disk) needs none of its own; whatever leaves that way
goes on in one, from where it stands. Jobs with input files wait for them in fetches.py on the way. However it goes, a
job ends inside its Celery task.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, TypeVar

import redis
from celery.exceptions import Ignore
from saggar.engine.errors import EngineError
from saggar.engine.handle import Handle, Reservation
from saggar.engine.request import Output
from saggar.jobs.ledger import NotStarted, Started
from saggar.jobs.record import JobResult
from saggar.jobs.schema import Job
from saggar.workers.attempts import Attempt
from saggar.workers.delivery import Delivery
from saggar.workers.fetches import Fetches
from saggar.workers.group import GroupPublisher, Made, Rest
from saggar.workers.inbox import Inbox
from saggar.workers.service import Service

log = logging.getLogger(__name__)
T = TypeVar("T")
PUBLISHERS = 2
"""While one waits for the disk, the other encodes."""
GROUP = 32
"""Most jobs of one step: the first of them waits for the last."""


@dataclass(eq=False, slots=True)
class Work:
    """A delivered job. Its Celery task, which takes the rest of the way from the line, is run by `here` in the calling
    thread, and by `aside` in one of its own."""

    delivery: Delivery
    here: Callable[[], None]
    aside: Callable[[], None]
    rest: Rest | None = None


@dataclass(eq=False, slots=True)
class _Running:
    """In the engine."""

    work: Work
    job: Job
    attempt: Attempt
    handle: Handle


class Line:
    """`held(token)`: whether the delivery is still ours, asked once, when it is taken up. `seat(token)`: what is
    reserved for it in the engine. Close it."""

    def __init__(
        self,
        service: Service,
        group: GroupPublisher,
        held: Callable[[str], bool],
        seat: Callable[[str], Reservation | None],
    ) -> None:
        self._service = service
        self._group = group
        self._held = held
        self._seat = seat
        self._works: dict[str, Work] = {}
        self._changed = threading.Condition()
        self._arrived: Inbox[Work] = Inbox()
        self._made: Inbox[_Running] = Inbox()
        self._fetches = Fetches(service)
        self._threads = [
            threading.Thread(target=self._serve, args=(self._arrived, self._take_up), name="saggar-starts")
        ]
        self._threads += [
            threading.Thread(
                target=self._serve, args=(self._made, self._publish), name=f"saggar-publish-{number}"
            )
            for number in range(PUBLISHERS)
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def delivery(self, job_id: str, token: str, put: int, key: str | None) -> Delivery:
        """A delivered message, with its seat."""
        return Delivery(job_id, token, put, key, self._seat(token))

    def take(self, work: Work) -> None:
        """From the thread that consumes."""
        with self._changed:
            self._works[work.delivery.token] = work
        self._arrived.put(work)

    def finish(self, token: str) -> JobResult:
        """Called by the job's task: what is left to do for it. Raises as Service.run, and Ignore."""
        rest = self._works[token].rest
        assert rest is not None
        return rest()

    def left(self, token: str) -> None:
        """The task is over."""
        with self._changed:
            work = self._works.pop(token)
            if not self._works:
                self._changed.notify_all()
        if work.delivery.reservation is not None:
            work.delivery.reservation.release()

    def close(self) -> None:
        """Waits until everything that was taken has come to its end."""
        with self._changed:
            self._changed.wait_for(lambda: not self._works)
        self._arrived.close()
        self._fetches.close()
        self._made.close()
        for thread in self._threads:
            thread.join()

    # -- the first step

    def _take_up(self, works: Sequence[Work]) -> None:
        ours = []
        for work in works:
            if self._held(work.delivery.token):
                ours.append(work)
            else:
                self._end_here(work, _given_back(work.delivery.job_id))
        try:
            answers = self._service.start_all([work.delivery for work in ours])
        except redis.RedisError as error:
            log.info("%d jobs wait for Redis: %s", len(ours), error)
            answers = [error] * len(ours)
        except Exception as error:  # an answer that is not understood must not be the end of this thread
            log.exception("%d jobs could not be taken up together", len(ours))
            answers = [error] * len(ours)
        for work, answer in zip(ours, answers, strict=True):
            try:
                self._enter(work, answer)
            except Exception:  # an error of ours
                log.exception("%s could not be taken up with others", work.delivery.job_id)
                self._go_aside(work, partial(self._service.run, *work.delivery.args()))

    def _enter(self, work: Work, answer: object) -> None:
        delivery, service = work.delivery, self._service
        if isinstance(answer, NotStarted):
            self._go_aside(work, partial(service.go_on, delivery, answer))
            return
        if not isinstance(answer, Started):  # it could not be read, or Redis did not answer: ask again
            self._go_aside(work, partial(service.run, *delivery.args()))
            return
        attempt = service.admit(delivery, answer)
        job = service.plain(delivery, answer)
        if job is None:
            whole = partial(service.attempt, delivery, answer, attempt)
            self._go_aside(work, partial(service.to_its_end, attempt, whole))
            return
        entered, failed = (
            partial(self._entered, work, job, attempt),
            partial(self._refused, work, job, attempt),
        )
        if job.has_inputs:
            self._fetches.put(job, attempt, delivery.reservation, entered, failed)
            return
        try:
            handle = service.enter(job, attempt, delivery.reservation, {})
        except EngineError as error:
            failed(error)
        else:
            entered(handle)

    def _entered(self, work: Work, job: Job, attempt: Attempt, handle: Handle) -> None:
        running = _Running(work, job, attempt, handle)
        handle.add_done_callback(lambda _: self._made.put(running))

    def _refused(self, work: Work, job: Job, attempt: Attempt, error: Exception) -> None:
        """Its files could not be had, or the engine does not take it."""
        finish = partial(self._service.finish, job, attempt, partial(_raise, error))
        self._go_aside(work, partial(self._service.to_its_end, attempt, finish))

    # -- the last step

    def _publish(self, ended: Sequence[_Running]) -> None:
        group: list[tuple[Work, Made]] = []
        for one in ended:
            finish = partial(self._service.finish, one.job, one.attempt, one.handle.result)
            output = self._small(one.handle)
            if output is not None:
                group.append((one.work, Made(one.job, one.attempt, output, finish)))
            else:
                self._go_aside(one.work, partial(self._service.to_its_end, one.attempt, finish))
        if not group:
            return
        try:
            self._group.publish([made for _, made in group])
        except Exception:  # each goes on by itself, from the last step that it made
            log.exception("a group of %d outputs fell apart", len(group))
        for work, made in group:
            rest = partial(self._service.to_its_end, made.attempt, made.rest)
            (self._end_here if made.ended else self._go_aside)(work, rest)

    def _small(self, handle: Handle) -> Output | None:
        """The output, if it goes with others."""
        if handle.error() is not None:
            return None
        output = handle.result()
        return output if self._group.takes(output) else None

    # -- the ways out

    def _end_here(self, work: Work, rest: Rest) -> None:
        work.rest = rest
        try:
            work.here()
        except Exception:  # Celery has answered for it, or its lease runs out
            log.exception("%s: its task could not be ended", work.delivery.job_id)

    def _go_aside(self, work: Work, rest: Rest) -> None:
        work.rest = rest
        try:
            work.aside()
        except Exception:  # the pool is gone, and this worker in a moment: its leases go back
            log.exception("%s: no thread for it", work.delivery.job_id)

    def _serve(self, inbox: Inbox[T], step: Callable[[Sequence[T]], None]) -> None:
        while items := inbox.take(GROUP):
            step(items)
            del items  # what they started from would stay in memory until the next ones come


def _given_back(job_id: str) -> Rest:
    def rest() -> JobResult:
        raise Ignore(f"{job_id} was given back before it started")

    return rest


def _raise(error: Exception) -> NoReturn:
    raise error
