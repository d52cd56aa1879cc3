"""What a worker makes of failures that no process has to die for: on a fake Redis and a real engine."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import fakeredis
import pytest
from saggar.engine.config import EngineConfig
from saggar.engine.engine import Engine
from saggar.engine.errors import EngineError, WorkerDied
from saggar.engine.live import OnEvent
from saggar.engine.request import EngineEvent, Request
from saggar.jobs.cards import batch_key, check_job
from saggar.jobs.errors import JobFailed
from saggar.jobs.ledger import Ledger, alone_key, is_alone, job_message
from saggar.jobs.schema import Job
from saggar.jobs.settings import JobSettings
from saggar.storage.errors import StorageUnavailable
from saggar.storage.local import LocalStorage
from saggar.workers.appetite import EngineAppetite
from saggar.workers.attempts import Attempts
from saggar.workers.publish import Origin, Publisher
from saggar.workers.service import Dropped, GivenBack, Service
from saggar.workers.translate import to_card

from tests.support.cluster import noop_model
from tests.support.inputs import input_loader
from tests.support.site import ROOT


class Bench:
    def __init__(self, folder: Path, engine: Engine) -> None:
        self.redis = fakeredis.FakeRedis(decode_responses=True)
        self.ledger = Ledger(self.redis, JobSettings())
        self.attempts = Attempts(self.ledger, pulse_s=0.02)
        self.engine = engine
        self.storage = LocalStorage(folder / "store")
        self.card = to_card(engine.info, "noop", 8)
        self.lost: list[bool] = []
        publisher = Publisher(self.storage, None, Origin("noop", "r1", {}))
        self.service = Service(
            self.ledger,
            self.attempts,
            engine,
            publisher,
            self.card,
            "me",
            lambda: self.lost.append(True),
            input_loader("file:///nowhere"),
        )

    def queue(self, **fields: object) -> Job:
        job = check_job(Job.model_validate({"model": "noop", "prompt": "p", "seed": 1, **fields}), self.card)
        self.ledger.submit(job, job_message(job, self.card), job.digest())
        return job

    def record(self, job: Job):
        record = self.ledger.get(job.id)
        assert record is not None
        return record

    def crash(self, job: Job, times: int) -> None:
        """As if workers had died while executing it; the last message is left to whoever comes."""
        for number in range(times):
            started = self.ledger.start(job.id, f"victim {number}", f"crash-{number}", self.record(job).put)
            self.ledger.progress(job.id, started.attempt, 0, 4)

    def lane_key(self, job: Job) -> str:
        """The batch key of the job's newest message."""
        newest = self.redis.hget("saggar:gen.noop:id", job.id)
        return str(self.redis.hget("saggar:gen.noop:m", newest)).split("\x1f")[7]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Engine.make(EngineConfig(model=str(noop_model(tmp_path / "noop")), executor="local")) as engine:
        bench = Bench(tmp_path, engine)
        yield bench
        bench.attempts.close()


def test_an_engine_whose_loop_failed_gives_the_job_back(bench: Bench, monkeypatch) -> None:
    """Otherwise the worker would answer every job with its own failure, or sit there for ever."""

    def fail(*_: object, **__: object) -> None:
        raise EngineError("the engine's loop failed")

    monkeypatch.setattr(bench.engine, "submit", fail)
    job = bench.queue()
    with pytest.raises(GivenBack):
        bench.service.run(job.id, "t1")
    assert bench.lost
    assert bench.record(job).state == "queued"


def test_an_error_of_ours_ends_the_job_instead_of_coming_back_for_ever(bench: Bench, monkeypatch) -> None:
    monkeypatch.setattr("saggar.workers.publish.encode_media", lambda *_: 1 / 0)
    job = bench.queue()
    with pytest.raises(JobFailed, match="internal: ZeroDivisionError"):
        bench.service.run(job.id, "t1")
    assert bench.record(job).state == "failed"


@pytest.mark.parametrize("call", ["put", "put_if_absent", "head"])
def test_a_store_that_is_away_for_a_moment_cancels_nothing(bench: Bench, monkeypatch, call: str) -> None:
    method, failures = getattr(bench.storage, call), [1, 2, 3]

    def flaky(*args: object, **more: object) -> object:
        if failures:
            failures.pop()
            raise StorageUnavailable("not now")
        return method(*args, **more)

    job = bench.queue()
    bench.crash(job, 1)
    bench.ledger.progress(job.id, 1, 4, 4, kind="uploading")
    monkeypatch.setattr(bench.storage, call, flaky)
    assert bench.service.run(job.id, "t1").attempt == 2
    assert bench.record(job).state == "succeeded"
    assert not failures


def test_the_first_crash_costs_a_pause_and_the_second_the_company(bench: Bench) -> None:
    job = bench.queue()
    plain = batch_key(job, bench.card)
    bench.crash(job, 1)
    with pytest.raises(Dropped):
        bench.service.run(job.id, "t1", key=plain)
    assert bench.record(job).state == "queued"
    assert bench.lane_key(job) == plain
    assert bench.redis.zcard("saggar:gen.noop:d") == 1, "it waits for its time"
    bench.crash(job, 1)
    with pytest.raises(Dropped):
        bench.service.run(job.id, "t2", put=2, key=plain)
    assert bench.lane_key(job) == alone_key(job.id)
    assert bench.service.run(job.id, "t3", put=3, key=alone_key(job.id)).batch_size == 1


def test_the_third_crash_is_the_last(bench: Bench) -> None:
    job = bench.queue()
    bench.crash(job, 3)
    with pytest.raises(JobFailed, match="worker_died: its worker died 3 times"):
        bench.service.run(job.id, "t1", key=alone_key(job.id))
    record = bench.record(job)
    assert (record.dead, record.suspicions) == (True, 3)


class Lost:
    """A request whose ranks died each time that they began it, so many times."""

    def __init__(self, deaths: int) -> None:
        self._deaths = deaths

    def submit(self, request: Request, *, reservation: object, on_event: OnEvent) -> Lost:
        for _ in range(self._deaths):
            on_event(EngineEvent("started", request.id, 0, 4, "batch", 1))
        return self

    def result(self) -> NoReturn:
        raise WorkerDied("the rank's process has ended (killed by SIGKILL)")


def test_ranks_that_die_of_a_job_count_like_workers(bench: Bench, monkeypatch) -> None:
    job = bench.queue()
    plain = batch_key(job, bench.card)
    monkeypatch.setattr(bench.engine, "submit", Lost(2).submit)
    with pytest.raises(Dropped):
        bench.service.run(job.id, "t1", key=plain)
    assert (bench.record(job).state, bench.record(job).suspicions) == ("queued", 2)
    assert bench.lane_key(job) == alone_key(job.id)
    monkeypatch.setattr(bench.engine, "submit", Lost(1).submit)
    with pytest.raises(Dropped):
        bench.service.run(job.id, "t2", put=2, key=alone_key(job.id))
    with pytest.raises(JobFailed, match="worker_died: its worker died 3 times"):
        bench.service.run(job.id, "t3", put=3, key=alone_key(job.id))
    assert (bench.record(job).dead, bench.record(job).suspicions) == (True, 3)


def test_a_job_that_only_waited_when_the_engine_gave_up_is_no_suspect(bench: Bench, monkeypatch) -> None:
    monkeypatch.setattr(bench.engine, "submit", Lost(0).submit)
    job = bench.queue()
    with pytest.raises(GivenBack):
        bench.service.run(job.id, "t1")
    assert (bench.record(job).state, bench.record(job).suspicions) == ("queued", 0)


def test_a_crash_while_uploading_is_no_suspicion(bench: Bench) -> None:
    job = bench.queue()
    bench.crash(job, 1)
    bench.ledger.progress(job.id, 1, 4, 4, kind="uploading")
    assert bench.service.run(job.id, "t1").attempt == 2
    assert bench.record(job).suspicions == 0


def test_nothing_is_fetched_beside_a_suspect(bench: Bench) -> None:
    appetite = EngineAppetite(bench.engine, 8)
    assert appetite.want("gen.noop", 64).rows == 8
    appetite.fetched("gen.noop", alone_key("j"), 0, {"tag": 1})
    want = appetite.want("gen.noop", 64)
    assert (want.rows, want.room, want.urgent) == (0, 0, 0)
    appetite.gone("tag")
    assert appetite.want("gen.noop", 64).rows == 8
    assert is_alone(alone_key("j"))
    assert not is_alone(batch_key(bench.queue(), bench.card))


def test_a_job_that_is_here_twice_is_two_requests(bench: Bench) -> None:
    """Its lease was lost and came back to the same worker: the fenced attempt must not fail the new one."""
    import threading

    job = bench.queue(params={"sleep_s": 0.05, "steps": 20})
    old: list[BaseException] = []

    def first() -> None:
        try:
            bench.service.run(job.id, "t1")
        except Dropped as dropped:
            old.append(dropped)

    thread = threading.Thread(target=first)
    thread.start()
    while not any(one.handle for one in bench.attempts.in_hand()):
        thread.join(0.01)
    bench.redis.hset(f"saggar:job:{job.id}", "uploading", "1")  # so that the second is no suspect
    assert bench.service.run(job.id, "t2").attempt == 2
    thread.join(20)
    assert old
    assert bench.record(job).result.attempt == 2


@pytest.mark.parametrize("folder", ["jobs/lanes", "jobs/ledger"])
def test_nobodys_clock_is_asked_but_redis_own(folder: str) -> None:
    """By construction: what talks to the scripts never reads the time of day."""
    asked = []
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("time", "time_ns", "now", "utcnow", "today"):
                asked.append(f"{path.name}:{node.lineno}")
    assert asked == []
