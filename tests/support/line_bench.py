"""A line and everything around it: a real engine without a model, a fake Redis and a real folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fakeredis
from celery.exceptions import Ignore
from saggar.engine.config import EngineConfig
from saggar.engine.engine import Engine
from saggar.jobs.cards import batch_key, check_job
from saggar.jobs.errors import JobFailed
from saggar.jobs.ledger import Ledger, job_message
from saggar.jobs.record import JobResult
from saggar.jobs.schema import Job
from saggar.jobs.settings import JobSettings
from saggar.storage.local import LocalStorage
from saggar.workers.attempts import Attempts
from saggar.workers.group import GroupPublisher
from saggar.workers.inputs.load import InputLoader
from saggar.workers.line import Line, Work
from saggar.workers.publish import Origin, Publisher
from saggar.workers.service import Dropped, GivenBack, Service
from saggar.workers.translate import to_card

from tests.support.cluster import noop_model, until
from tests.support.inputs import input_loader


class Bench:
    """A line and everything around it. `ends`: by job, what its task returned or raised; `alone`: jobs that got a
    thread of their own."""

    def __init__(self, folder: Path, engine: Engine, loader: InputLoader | None = None) -> None:
        self.server = fakeredis.FakeServer()
        self.ledger = Ledger(fakeredis.FakeRedis(server=self.server, decode_responses=True), JobSettings())
        self.attempts = Attempts(self.ledger, pulse_s=0.02)
        self.storage = LocalStorage(folder / "store")
        self.card = to_card(engine.info, "noop", 8)
        self.publisher = Publisher(self.storage, None, Origin("noop", "r1", {}))
        service = Service(
            self.ledger,
            self.attempts,
            engine,
            self.publisher,
            self.card,
            "me",
            lambda: None,
            loader or input_loader(self.storage.url),
        )
        group = GroupPublisher(self.ledger, self.attempts, self.publisher, service)
        self.given_back: set[str] = set()
        self.line = Line(service, group, lambda token: token not in self.given_back, lambda _: None)
        self.ends: dict[str, JobResult | BaseException] = {}
        self.alone: list[str] = []

    def queue(self, **fields: object) -> Job:
        job = check_job(Job.model_validate({"model": "noop", "prompt": "p", "seed": 1, **fields}), self.card)
        self.ledger.submit(job, job_message(job, self.card), job.digest())
        return job

    def take(self, *jobs: Job) -> None:
        for job in jobs:
            self._take(job)

    def _take(self, job: Job) -> None:
        token = f"t-{job.id}"
        delivery = self.line.delivery(job.id, token, 1, batch_key(job, self.card))

        def here() -> None:
            try:
                self.ends[job.id] = self.line.finish(token)
            except (Dropped, GivenBack, Ignore, JobFailed) as error:
                self.ends[job.id] = error
            finally:
                self.line.left(token)

        def aside() -> None:
            self.alone.append(job.id)
            threading.Thread(target=here).start()

        self.line.take(Work(delivery, here, aside))

    def end(self, job: Job) -> JobResult | BaseException:
        return until(lambda: self.ends.get(job.id), 30, f"the end of {job.id}")

    def state(self, job: Job) -> str:
        record = self.ledger.get(job.id)
        assert record is not None
        return record.state


@contextmanager
def line_bench(folder: Path, loader: InputLoader | None = None) -> Iterator[Bench]:
    """Closed in order, with nothing left in hand."""
    with Engine.make(EngineConfig(model=str(noop_model(folder / "noop")), executor="local")) as engine:
        bench = Bench(folder, engine, loader)
        yield bench
        bench.line.close()
        assert bench.attempts.in_hand() == []
        bench.attempts.close()


def whole(bench: Bench, job: Job) -> JobResult:
    """The job's result, which is the record's and whose files are there."""
    result = bench.end(job)
    assert isinstance(result, JobResult), result
    record = bench.ledger.get(job.id)
    assert record is not None
    assert (record.state, record.result) == ("succeeded", result)
    assert bench.publisher.find(job) == result
    return result
