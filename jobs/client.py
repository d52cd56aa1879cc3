"""The client of a producer: submit, look, wait, cancel, try again. Once in blocking form, once for asyncio.

Needs Redis alone. The two differ in how they wait; what they say and understand is in desk.py.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar, Unpack, cast

from saggar.jobs.desk import Chunks, Desk, JobLike, Patience, known, merged, succeeded
from saggar.jobs.errors import SaggarError
from saggar.jobs.events import AsyncEvents, Event, Events
from saggar.jobs.ledger.aio import AsyncRunner
from saggar.jobs.ledger.ledger import Runner
from saggar.jobs.ledger.ops import Criteria
from saggar.jobs.ledger.parse import Cancelled, Page, Submitted
from saggar.jobs.ledger.script import Op
from saggar.jobs.record import JobRecord, JobResult, State
from saggar.jobs.schema import Job, parse_job
from saggar.jobs.settings import JobSettings, connect, connect_async

if TYPE_CHECKING:
    import redis
    import redis.asyncio

CHUNK = 500  # jobs of one round trip
T = TypeVar("T")
Entries: TypeAlias = list[Op[Submitted] | SaggarError]


class JobClient:
    """Blocking. May be shared by threads. Errors of Redis itself (redis.RedisError) pass through."""

    def __init__(self, settings: JobSettings | str, client: redis.Redis | None = None) -> None:
        """`settings` or a Redis URL. `client`: one that answers in text, instead of an own one."""
        self.settings = JobSettings.make(redis_url=settings) if isinstance(settings, str) else settings
        self._client = client if client is not None else connect(self.settings)
        self._runner = Runner(self._client, self.settings)
        self._desk = Desk.of(self.settings)
        self._events = Events(self._runner, self.settings)

    def submit(self, job: JobLike) -> Submitted:
        """Checks the job against its model's card and queues it. The same job again (by id or idempotency
        key) is the same job. Raises InvalidJob, UnknownModel, InvalidCard, Conflict, QueueFull."""
        checked = parse_job(job)
        self._fetch_cards([checked])
        models = self.models() if self._desk.lacks_card(checked) else []
        return self._runner.run(self._desk.submission(checked, models))

    def submit_many(self, jobs: Iterable[JobLike], chunk: int = CHUNK) -> Iterator[Submitted | SaggarError]:
        """One outcome for each job, in order, a chunk in a round trip. What `submit` would raise stands in
        its place: one bad line does not stop the rest. Lazy: nothing is sent before it is iterated; a chunk
        is read and checked ahead, while Redis works on the one before. What `jobs` itself raises comes after the
        outcomes of all that it gave before. Raises InvalidJob: a chunk below 1, or one job instead of many.

        An error of Redis comes after the outcomes of all chunks before the one that it met. Of that chunk, any job may
        have been accepted, and of the next ones none. The call may be made again from its beginning if the jobs have
        ids or idempotency keys: those that were accepted are found, and none is queued twice.

        Who forks amid it goes on in one of the processes; in the other it raises SaggarError."""
        source, process = Chunks(jobs, chunk), os.getpid()
        with ThreadPoolExecutor(1, "saggar-submit") as wire:
            entries = self._submissions(source)
            while entries:
                answers = wire.submit(self._runner.run_many, [e for e in entries if isinstance(e, Op)])
                ahead = _done(lambda: self._submissions(source))
                for outcome in merged(entries, answers.result()):
                    yield outcome
                    if os.getpid() != process:  # its thread is not here
                        raise SaggarError(
                            "submit_many was begun in another process: call it again in this one"
                        )
                entries = ahead.result()  # an error comes after the outcomes before it

    def status(self, job_id: str) -> JobRecord:
        """With its place in the queue while it waits. Raises UnknownJob."""
        return known(job_id, self._runner.run(self._desk.ops.get(job_id)))

    def statuses(self, job_ids: Sequence[str]) -> Sequence[JobRecord | None]:
        """The records of many, in one round trip; None for one that is unknown. Raises InvalidJob."""
        answers = self._runner.run_many([self._desk.ops.get(job_id) for job_id in job_ids])
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return cast("Sequence[JobRecord | None]", answers)

    def list(self, **criteria: Unpack[Criteria]) -> Page:
        """A page of the jobs that match all criteria, at least one; the next by the page's `cursor`.
        Raises InvalidJob."""
        return self._runner.run(self._desk.ops.list(criteria))

    def counts(self, run: str | None = None) -> dict[State, int]:
        """Known jobs by state, of all or of a run."""
        return self._runner.run(self._desk.ops.counts(run))

    def models(self) -> Sequence[str]:
        """Models that have a card."""
        return sorted(cast("Sequence[str]", self._client.hkeys(self._desk.cards_key)))

    def events(
        self,
        job_id: str | None = None,
        *,
        run: str | None = None,
        after: str | None = None,
        follow: bool = True,
        idle_s: float | None = None,
    ) -> Iterator[Event]:
        """The history of a job or of a run behind the cursor `after` and, with `follow`, what comes: until
        the job's terminal event, or until nothing came for `idle_s` seconds. Raises UnknownJob."""
        if not follow:
            return self._events.replay(job_id, run=run, after=after)
        return self._events.follow(job_id, run=run, after=after, idle_s=idle_s)

    def wait(self, job_id: str, timeout_s: float | None = None) -> JobRecord:
        """The record once the job has ended, however. Raises WaitTimeout, UnknownJob."""
        patience = Patience(job_id, timeout_s)
        with self._client.pubsub(ignore_subscribe_messages=True) as wire:  # type: ignore[no-untyped-call]
            wire.subscribe(self._desk.result_channel(job_id))
            while not (record := self.status(job_id)).ended:
                wire.get_message(timeout=patience.left())
        return record

    def result(self, job_id: str, timeout_s: float | None = None) -> JobResult:
        """Waits for success. Raises JobFailed (with the record) for another end; WaitTimeout, UnknownJob."""
        return succeeded(self.wait(job_id, timeout_s))

    def cancel(self, job_id: str, *, waiting_only: bool = False) -> Cancelled:
        """A waiting job ends at once, a running one at its next step (`waiting_only`: not at all). One that is not
        known yet will end as it comes."""
        return self._runner.run(self._desk.ops.cancel(job_id, waiting_only=waiting_only))

    def retry(self, job_id: str) -> Submitted:
        """Another attempt for a failed, cancelled or expired job; a deadline that is over is dropped.
        Raises NotRetryable, UnknownJob."""
        while True:
            record = self.status(job_id)
            self._fetch_cards([record.job])
            if self._runner.run(self._desk.revival(record)):
                return Submitted(job_id, True, "queued")

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submissions(self, source: Chunks) -> Entries:
        """For the next jobs of the source, none at its end. Raises what the source does."""
        part = source.next()
        self._fetch_cards(part)
        models = self.models() if any(map(self._desk.lacks_card, part)) else []
        return self._desk.submissions(part, models)

    def _fetch_cards(self, jobs: Iterable[Job | SaggarError]) -> None:
        if missing := self._desk.cards.missing(jobs):
            texts = cast("Sequence[str | None]", self._client.hmget(self._desk.cards_key, missing))
            self._desk.cards.add(missing, texts)


def _done(call: Callable[[], T]) -> Future[T]:
    """What it returns or raises, for whoever asks later."""
    done: Future[T] = Future()
    try:
        done.set_result(call())
    except Exception as error:  # noqa: BLE001  (it is the answer)
        done.set_exception(error)
    return done


class AsyncJobClient:
    """The same for asyncio: one event loop, any number of tasks."""

    def __init__(self, settings: JobSettings | str, client: redis.asyncio.Redis | None = None) -> None:
        """As JobClient."""
        self.settings = JobSettings.make(redis_url=settings) if isinstance(settings, str) else settings
        self._client = client if client is not None else connect_async(self.settings)
        self._runner = AsyncRunner(self._client, self.settings)
        self._desk = Desk.of(self.settings)
        self._events = AsyncEvents(self._runner, self.settings)

    async def submit(self, job: JobLike) -> Submitted:
        """As JobClient.submit."""
        checked = parse_job(job)
        await self._fetch_cards([checked])
        models = await self.models() if self._desk.lacks_card(checked) else []
        return await self._runner.run(self._desk.submission(checked, models))

    async def submit_many(
        self, jobs: Iterable[JobLike], chunk: int = CHUNK
    ) -> AsyncIterator[Submitted | SaggarError]:
        """As JobClient.submit_many."""
        source = Chunks(jobs, chunk)
        while part := source.next():
            await self._fetch_cards(part)
            models = await self.models() if any(map(self._desk.lacks_card, part)) else []
            entries = self._desk.submissions(part, models)
            answers = await self._runner.run_many([e for e in entries if isinstance(e, Op)])
            for outcome in merged(entries, answers):
                yield outcome

    async def status(self, job_id: str) -> JobRecord:
        """As JobClient.status."""
        return known(job_id, await self._runner.run(self._desk.ops.get(job_id)))

    async def list(self, **criteria: Unpack[Criteria]) -> Page:
        """As JobClient.list."""
        return await self._runner.run(self._desk.ops.list(criteria))

    async def counts(self, run: str | None = None) -> dict[State, int]:
        """As JobClient.counts."""
        return await self._runner.run(self._desk.ops.counts(run))

    async def models(self) -> Sequence[str]:
        """As JobClient.models."""
        return sorted(cast("Sequence[str]", await self._client.hkeys(self._desk.cards_key)))

    def events(
        self,
        job_id: str | None = None,
        *,
        run: str | None = None,
        after: str | None = None,
        follow: bool = True,
        idle_s: float | None = None,
    ) -> AsyncIterator[Event]:
        """As JobClient.events."""
        if not follow:
            return self._events.replay(job_id, run=run, after=after)
        return self._events.follow(job_id, run=run, after=after, idle_s=idle_s)

    async def wait(self, job_id: str, timeout_s: float | None = None) -> JobRecord:
        """As JobClient.wait."""
        patience = Patience(job_id, timeout_s)
        async with self._client.pubsub(ignore_subscribe_messages=True) as wire:
            await wire.subscribe(self._desk.result_channel(job_id))
            while not (record := await self.status(job_id)).ended:
                await wire.get_message(timeout=patience.left())
        return record

    async def result(self, job_id: str, timeout_s: float | None = None) -> JobResult:
        """As JobClient.result."""
        return succeeded(await self.wait(job_id, timeout_s))

    async def cancel(self, job_id: str) -> Cancelled:
        """As JobClient.cancel."""
        return await self._runner.run(self._desk.ops.cancel(job_id))

    async def retry(self, job_id: str) -> Submitted:
        """As JobClient.retry."""
        while True:
            record = await self.status(job_id)
            await self._fetch_cards([record.job])
            if await self._runner.run(self._desk.revival(record)):
                return Submitted(job_id, True, "queued")

    async def close(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _fetch_cards(self, jobs: Iterable[Job | SaggarError]) -> None:
        if missing := self._desk.cards.missing(jobs):
            texts = cast("Sequence[str | None]", await self._client.hmget(self._desk.cards_key, missing))
            self._desk.cards.add(missing, texts)
