"""Jobs with input files in the line: fetched side by side, published with the others, stopped wherever they are."""

from __future__ import annotations

import io
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from PIL import Image
from saggar.engine.errors import OutOfMemory
from saggar.engine.media import Media
from saggar.jobs.errors import JobFailed
from saggar.jobs.record import JobResult
from saggar.jobs.schema import Job
from saggar.workers.attempts import Attempt
from saggar.workers.fetches import Fetch, Fetches
from saggar.workers.inputs.decoders import Decoders, Stopped
from saggar.workers.inputs.fetch import Fetcher, Ticket
from saggar.workers.inputs.load import FETCHING, InputLoader
from saggar.workers.inputs.pictures import PEAK_BYTES
from saggar.workers.inputs.policy import Limits, Policy
from saggar.workers.service import Dropped, GivenBack, Service

from tests.support.cluster import until
from tests.support.inputs import RED, decoders, image, input_loader
from tests.support.line_bench import Bench, line_bench, whole

PEAK = 12 * 8 * PEAK_BYTES
"""Bytes that decoding `image()` takes."""


class Gated(Fetcher):
    """A file named `slow` comes once the gate is open, or its job is not wanted any more."""

    def __init__(self, url: str) -> None:
        super().__init__(Policy.make(url), Limits())
        self.gate = threading.Event()
        self.asked = 0

    def fetch(self, uri: str, ticket: Ticket) -> IO[bytes]:
        if "slow" in uri:
            self.asked += 1
            while not self.gate.wait(0.01):
                if ticket.over.is_set():
                    raise Stopped
        return super().fetch(uri, ticket)


@pytest.fixture
def gated(tmp_path: Path) -> Gated:
    return Gated((tmp_path / "store").as_uri())


@pytest.fixture
def bench(tmp_path: Path, gated: Gated) -> Iterator[Bench]:
    with line_bench(tmp_path, InputLoader(gated, decoders=decoders())) as bench:
        yield bench
        gated.gate.set()


def queue(bench: Bench, name: str = "a", data: bytes | None = None, **fields: object) -> Job:
    bench.storage.put(f"uploads/{name}.png", image() if data is None else data, content_type="image/png")
    inputs = {"image": [bench.storage.uri(f"uploads/{name}.png")]}
    return bench.queue(task="i2i", inputs=inputs, **fields)


def colour(bench: Bench, result: JobResult) -> object:
    data = bench.storage.get(result.outputs[0].uri.removeprefix(f"{bench.storage.url}/"))
    with Image.open(io.BytesIO(data)) as picture:
        return picture.getpixel((0, 0))


def test_they_need_no_thread_of_their_own_either(bench: Bench) -> None:
    blue = (10, 20, 200)
    jobs = [queue(bench, f"p{n}", image(color=RED if n % 2 else blue)) for n in range(3 * FETCHING)]
    plain = bench.queue()
    bench.take(*jobs, plain)
    for number, job in enumerate(jobs):
        assert colour(bench, whole(bench, job)) == (RED if number % 2 else blue)
    whole(bench, plain)
    assert bench.alone == []


def test_what_jobs_started_from_is_let_go_of_when_they_have_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread that waits for the next jobs keeps the last ones' files, which nobody counts any more."""
    read, seen = Decoders.read, []

    def watched(self: Decoders, *arguments: Any, **named: Any) -> Media | None:
        media = read(self, *arguments, **named)
        seen.append(weakref.ref(media))
        return media

    monkeypatch.setattr(Decoders, "read", watched)
    jobs = [queue(bench, f"p{n}") for n in range(3 * FETCHING)]
    bench.take(*jobs)
    for job in jobs:
        whole(bench, job)
    assert len(seen) == len(jobs)
    until(lambda: all(one() is None for one in seen))
    bench.storage.put("uploads/bad.png", b"no picture", content_type="image/png")
    both = [bench.storage.uri(f"uploads/{name}.png") for name in ("p0", "bad")]
    failing = bench.queue(task="i2i", inputs={"image": both})
    bench.take(failing)
    failure = bench.end(failing)
    assert isinstance(failure, JobFailed), "which is kept here"
    assert len(seen) == len(jobs) + 1
    until(lambda: seen[-1]() is None)


def test_a_bad_file_fails_its_job_alone(bench: Bench) -> None:
    jobs = [queue(bench, f"p{n}", b"no picture" if n == 3 else None) for n in range(8)]
    bench.take(*jobs)
    failure = bench.end(jobs[3])
    assert isinstance(failure, JobFailed)
    assert str(failure).startswith("invalid: inputs.image[0]: is no picture that is read")
    assert bench.state(jobs[3]) == "failed"
    for job in jobs[:3] + jobs[4:]:
        whole(bench, job)
    assert bench.alone == [jobs[3].id]


def test_one_that_waits_for_its_turn_is_cancelled_at_once(bench: Bench, gated: Gated) -> None:
    slow = [queue(bench, f"slow{n}") for n in range(FETCHING + 2)]
    bench.take(*slow)
    until(lambda: gated.asked == FETCHING)
    until(lambda: len(bench.attempts.in_hand()) == len(slow))
    waiting, last = slow[-2:]
    bench.ledger.cancel(waiting.id)
    bench.attempts.cancel(waiting.id)
    assert isinstance(bench.end(waiting), Dropped)
    assert bench.state(waiting) == "cancelled"
    assert set(bench.ends) == {waiting.id}
    gated.gate.set()
    for job in [*slow[:FETCHING], last]:
        whole(bench, job)


def test_one_that_is_being_fetched_is_cancelled(bench: Bench, gated: Gated) -> None:
    slow, other = queue(bench, "slow"), queue(bench)
    bench.take(slow, other)
    whole(bench, other)
    bench.ledger.cancel(slow.id)
    bench.attempts.cancel(slow.id)
    assert isinstance(bench.end(slow), Dropped)
    assert bench.state(slow) == "cancelled"


def test_a_drain_gives_back_what_is_fetched_and_what_waits_for_it(bench: Bench, gated: Gated) -> None:
    slow = [queue(bench, f"slow{n}") for n in range(FETCHING + 3)]
    bench.take(*slow)
    until(lambda: gated.asked == FETCHING and len(bench.attempts.in_hand()) == len(slow))
    bench.attempts.drain()
    for job in slow:
        assert isinstance(bench.end(job), GivenBack)
        assert bench.state(job) == "queued"


def test_one_that_was_stopped_before_it_came_here_is_not_fetched(
    bench: Bench, gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = Service.admit

    def admit_stopped(self: Service, *arguments: object) -> object:
        attempt = admit(self, *arguments)  # type: ignore[arg-type]
        attempt.over.set()
        return attempt

    monkeypatch.setattr(Service, "admit", admit_stopped)
    slow = queue(bench, "slow")
    bench.take(slow)
    assert isinstance(bench.end(slow), Dropped)
    assert gated.asked == 0


class StopsAtOnce:
    """A service whose attempts are stopped the moment that they may be."""

    @property
    def files(self) -> StopsAtOnce:
        return self

    def expect(self, _attempt: object, fetching: Fetch, _reservation: object) -> None:
        fetching.cancel()


def test_a_stop_on_the_way_into_the_waiting_is_heard_once() -> None:
    """Told when the attempt can be stopped, and before the job could be taken back; no thread comes to it."""
    failed: list[Exception] = []
    fetches = Fetches(StopsAtOnce(), threads=0)  # type: ignore[arg-type]
    job = Job.model_validate(
        {"model": "noop", "prompt": "p", "task": "i2i", "inputs": {"image": ["s3://b/k"]}}
    )
    fetches.put(job, Attempt("j", 1, "t"), None, lambda _: None, failed.append)
    assert [type(error) for error in failed] == [Stopped]
    fetches.close()


def test_an_engine_that_refuses_fails_the_job(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Service, *_: object) -> object:
        raise OutOfMemory("no room for it")

    with monkeypatch.context() as patch:
        patch.setattr(Service, "enter", refuse)
        with_file, without = queue(bench), bench.queue()
        bench.take(with_file, without)
        for job in (with_file, without):
            assert str(bench.end(job)) == "out_of_memory: no room for it"
            assert bench.state(job) == "failed"
    again = queue(bench)
    bench.take(again)
    whole(bench, again)


def test_close_waits_for_what_is_fetched(bench: Bench, gated: Gated) -> None:
    jobs = [queue(bench, f"slow{n}") for n in range(2)]
    bench.take(*jobs)
    until(lambda: gated.asked == 2)
    closing = threading.Thread(target=bench.line.close)
    closing.start()
    assert bench.ends == {}
    gated.gate.set()
    closing.join(60)
    assert set(bench.ends) == {job.id for job in jobs}


class Watched(InputLoader):
    """Notes how many bytes are held whenever a job's files are there."""

    seen: list[int]

    @contextmanager
    def held(self, job: Job, ticket: Ticket) -> Iterator[Mapping[str, object]]:  # type: ignore[override]
        with super().held(job, ticket) as inputs:
            self.seen.append(self._budget.used)
            yield inputs


def test_what_the_engine_has_counts_as_held(tmp_path: Path) -> None:
    """With room for two, not more than two are decoded or in the engine; all is given back at the end."""
    fetcher = input_loader((tmp_path / "store").as_uri(), memory=2 * PEAK)._fetcher
    loader = Watched(fetcher, decoders=decoders())
    loader.seen = []
    with line_bench(tmp_path, loader) as bench:
        jobs = [queue(bench, params={"sleep_s": 0.005}) for _ in range(12)]
        bench.take(*jobs)
        for job in jobs:
            whole(bench, job)
    assert len(loader.seen) == 12
    assert max(loader.seen) <= 2 * PEAK
    assert loader._budget.used == 0
