"""Celery's pool over the line: what it is told of a job's task, and that other tasks run as ever."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from celery import Celery
from celery.exceptions import Reject
from saggar.jobs.lanes.message import KEY_HEADER
from saggar.jobs.ledger import PUT_HEADER, TASK
from saggar.workers.delivery import Delivery
from saggar.workers.line import Line, Work
from saggar.workers.pool import TRACE_LOGGER, pool_on

from tests.support.cluster import until


class StandIn:
    """A line that keeps what it is given."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.over: list[str] = []
        self.closed = False

    def delivery(self, job_id: str, token: str, put: int, key: str | None) -> Delivery:
        return Delivery(job_id, token, put, key)

    def take(self, work: Work) -> None:
        self.works.append(work)

    def left(self, token: str) -> None:
        self.over.append(token)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def line() -> StandIn:
    return StandIn()


@pytest.fixture
def pool(line: StandIn) -> Iterator[Any]:
    pool = pool_on(cast("Line", line))(2, app=Celery("t", set_as_current=False))
    pool.start()
    yield pool
    pool.stop()
    assert line.closed


def apply(pool: Any, target: Callable[..., object], name: str = TASK, **headers: object) -> list[object]:
    """What Celery hears: ("accepted"), then what the task came to."""
    heard: list[object] = []
    request = {"properties": {"delivery_tag": "tag"}, **headers}
    pool.apply_async(
        target,
        args=(name, "job-1", request, b"", "application/json", "utf-8"),
        callback=heard.append,
        accept_callback=lambda pid, when: heard.append("accepted"),
    )
    return heard


def test_a_job_begins_when_it_comes_and_ends_when_the_line_says_so(pool: Any, line: StandIn) -> None:
    heard = apply(pool, lambda *_: (0, "result", 0.0), **{PUT_HEADER: 3, KEY_HEADER: "k"})
    assert heard == ["accepted"]
    (work,) = line.works
    assert work.delivery == Delivery("job-1", "tag", 3, "k")
    work.here()
    assert line.over == ["tag"]
    failed, result, runtime = cast("tuple[int, object, float]", heard[1])
    assert (failed, result) == (0, "result")
    assert runtime > 0.0


def test_a_thread_of_its_own(pool: Any, line: StandIn) -> None:
    heard = apply(pool, lambda *_: (1, "error", 0.0))
    line.works[0].aside()
    until(lambda: line.over)
    assert cast("tuple[int, object, float]", heard[1])[:2] == (1, "error")
    assert line.works[0].delivery.put == 1


def test_what_breaks_a_task_leaves_nothing_in_the_line(pool: Any, line: StandIn) -> None:
    apply(pool, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        line.works[0].here()
    assert line.over == ["tag"]


def test_other_tasks_run_as_in_any_pool(pool: Any, line: StandIn) -> None:
    heard = apply(pool, lambda *_: "done", name="other.task")
    until(lambda: len(heard) == 2)
    assert (heard, line.works) == (["accepted", "done"], [])


def test_the_log_tells_the_time_since_the_job_came(
    pool: Any, line: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    def trace(*_: object) -> tuple[int, str, float]:
        logging.getLogger(TRACE_LOGGER).info("in %(runtime)ss", {"runtime": 0.0})
        return 0, "", 0.0

    apply(pool, trace)
    with caplog.at_level(logging.INFO, TRACE_LOGGER):
        line.works[0].here()
        trace()
    inside, outside = (record.getMessage() for record in caplog.records)
    assert outside == "in 0.0s"
    assert float(inside.removeprefix("in ").removesuffix("s")) > 0.0


def test_a_message_that_goes_back_is_logged_in_a_line(pool: Any, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(TRACE_LOGGER)
    for error in (Reject("j", requeue=True), RuntimeError("j")):
        try:
            raise error
        except Exception as raised:
            logger.warning("Task j", exc_info=raised)
    back, failed = (record.exc_info for record in caplog.records)
    assert back is None
    assert failed
