"""Jobs side by side through the line: on a real engine without a model, a fake Redis and a real folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery.exceptions import Ignore
from saggar.jobs.errors import JobFailed
from saggar.storage.errors import StorageUnavailable
from saggar.storage.local import LocalStorage
from saggar.workers.inbox import Inbox
from saggar.workers.line import GROUP
from saggar.workers.service import Dropped, Service

from tests.support.cluster import until
from tests.support.line_bench import Bench, line_bench, whole


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with line_bench(tmp_path) as bench:
        yield bench


def test_small_jobs_need_no_thread_of_their_own(bench: Bench) -> None:
    jobs = [bench.queue(prompt=f"p{n}", num_outputs=1 + n % 2) for n in range(40)]
    bench.take(*jobs)
    for job in jobs:
        assert len(whole(bench, job).outputs) == job.num_outputs
    assert bench.alone == []


def test_a_large_output_has_one(bench: Bench) -> None:
    small, large = bench.queue(), bench.queue(params={"height": 1024, "width": 1024})
    bench.take(small, large)
    whole(bench, small)
    whole(bench, large)
    assert bench.alone == [large.id]


def test_a_row_that_fails_is_alone_in_that(bench: Bench) -> None:
    jobs = [bench.queue(params={"fail_at": "decode" if n == 3 else ""}) for n in range(8)]
    bench.take(*jobs)
    assert isinstance(bench.end(jobs[3]), JobFailed)
    assert bench.state(jobs[3]) == "failed"
    for job in jobs[:3] + jobs[4:]:
        whole(bench, job)
    assert bench.alone == [jobs[3].id]


def test_what_was_given_back_is_not_taken_up(bench: Bench) -> None:
    job, other = bench.queue(), bench.queue()
    bench.given_back.add(f"t-{job.id}")
    bench.take(job, other)
    whole(bench, other)
    assert isinstance(bench.end(job), Ignore)
    assert bench.state(job) == "queued"


def test_what_has_ended_says_so_again(bench: Bench) -> None:
    cancelled, job = bench.queue(), bench.queue()
    bench.ledger.cancel(cancelled.id)
    bench.take(cancelled, job)
    whole(bench, job)
    assert isinstance(bench.end(cancelled), Dropped)


def test_a_second_attempt_looks_for_what_the_first_has_left(bench: Bench) -> None:
    job = bench.queue()
    bench.take(job)
    first = whole(bench, job)
    again = bench.queue(id="again", prompt="other")
    bench.ledger.start(again.id, "somebody else", "t0")
    bench.take(again)
    assert whole(bench, again).attempt == 2
    assert first.attempt == 1
    assert bench.alone == [again.id]


def test_a_redis_that_is_away_at_the_start_is_waited_for(bench: Bench) -> None:
    jobs = [bench.queue(), bench.queue()]
    bench.server.connected = False
    bench.take(*jobs)
    until(lambda: len(bench.alone) == 2)
    assert bench.ends == {}
    bench.server.connected = True
    for job in jobs:
        whole(bench, job)


def test_an_answer_that_is_not_understood_ends_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    start_all, calls = Service.start_all, []

    def once_wrong(self: Service, deliveries: object) -> object:
        calls.append(deliveries)
        if len(calls) == 1:
            raise TypeError("a list was expected from Redis")
        return start_all(self, deliveries)

    monkeypatch.setattr(Service, "start_all", once_wrong)
    for job in (bench.queue(), bench.queue()):
        bench.take(job)
        assert whole(bench, job).attempt == 1


def between(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str, do: Callable[[], None], error: bool = False
) -> None:
    """Something happens once, before a step of the group publisher."""
    made = getattr(LocalStorage, step)
    times: list[bool] = []

    def wrapped(self: LocalStorage, items: object) -> object:
        if not times:
            times.append(True)
            do()
            if error:
                raise StorageUnavailable("for a moment")
        return made(self, items)

    monkeypatch.setattr(LocalStorage, step, wrapped)


@pytest.mark.parametrize("step", ["put_group", "put_group_if_absent"])
def test_a_store_that_is_away_for_a_moment_fails_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    between(bench, monkeypatch, step, lambda: None, error=True)
    jobs = [bench.queue() for _ in range(4)]
    bench.take(*jobs)
    for job in jobs:
        assert whole(bench, job).attempt == 1
    assert bench.alone != []


def test_a_redis_that_is_away_for_the_records_is_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifests stand: what is left is to say so, not to make anything again."""

    def away() -> None:
        bench.server.connected = False

    between(bench, monkeypatch, "put_group_if_absent", away)
    job = bench.queue()
    bench.take(job)
    until(lambda: bench.alone == [job.id])
    manifest = bench.storage.get(f"{job.id}/result.json")
    bench.server.connected = True
    whole(bench, job)
    assert bench.storage.get(f"{job.id}/result.json") == manifest


def test_an_attempt_that_was_overtaken_is_not_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    job, other = bench.queue(), bench.queue()

    def overtake() -> None:
        bench.ledger.start(job.id, "somebody else", "t2")

    between(bench, monkeypatch, "put_group_if_absent", overtake)
    bench.take(job, other)
    whole(bench, other)
    assert isinstance(bench.end(job), Dropped)
    assert bench.state(job) == "running"


def test_a_manifest_that_came_first_is_the_result(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an attempt before, which was frozen and is thawed at this moment."""
    job, earlier = bench.queue(), bench.queue(id="earlier")
    bench.take(earlier)
    whole(bench, earlier)
    text = bench.storage.get("earlier/result.json").decode().replace('"earlier"', f'"{job.id}"')
    text = text.replace('"attempt": 1', '"attempt": 7')
    between(
        bench,
        monkeypatch,
        "put_group_if_absent",
        lambda: bench.storage.put(f"{job.id}/result.json", text.encode(), content_type="x") and None,
    )
    bench.take(job)
    assert whole(bench, job).attempt == 7


def test_what_cannot_be_stored_fails_alone(bench: Bench, tmp_path: Path) -> None:
    bad, good = bench.queue(), bench.queue()
    (tmp_path / "store" / bad.id).write_text("in the way")
    bench.take(bad, good)
    whole(bench, good)
    assert isinstance(bench.end(bad), JobFailed)
    assert bench.state(bad) == "failed"


def test_an_error_of_ours_makes_each_go_its_own_way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down() -> None:
        raise RuntimeError("not foreseen")

    between(bench, monkeypatch, "put_group", break_down)
    job = bench.queue()
    bench.take(job)
    assert whole(bench, job).attempt == 1
    assert bench.alone == [job.id]


def test_close_waits_for_what_was_taken(bench: Bench) -> None:
    jobs = [bench.queue(params={"sleep_s": 0.01, "steps": 5}) for _ in range(3)]
    bench.take(*jobs)
    bench.line.close()
    assert set(bench.ends) == {job.id for job in jobs}


def test_a_group_is_bounded() -> None:
    inbox: Inbox[int] = Inbox()
    for number in range(50):
        inbox.put(number)
    assert inbox.take(GROUP) == list(range(GROUP))
    assert inbox.take(GROUP) == list(range(GROUP, 50))
    inbox.close()
    assert inbox.take(GROUP) == []
