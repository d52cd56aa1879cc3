"""Celery's own users feel at home: send_task, AsyncResult, links, chains, groups and chords over lanes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery, chain, chord, group, signature
from saggar.jobs.client import JobClient
from saggar.jobs.errors import Conflict, InvalidJob, JobFailed
from saggar.jobs.ledger import TASK
from saggar.workers.app import make_app

from tests.support.cluster import until
from tests.workers.conftest import StartWorker

pytestmark = pytest.mark.e2e

JOB = {"model": "noop", "prompt": "sent"}


@pytest.fixture
def app(client: JobClient) -> Iterator[Celery]:
    app = make_app(client.settings)
    yield app
    app.close()


@pytest.fixture
def cluster(start_worker: StartWorker) -> None:
    start_worker("--chores", model="")
    start_worker().ready("noop")


@pytest.mark.usefixtures("cluster")
def test_message_j_is_job_j(app: Celery, client: JobClient) -> None:
    sent = app.send_task(TASK, kwargs={**JOB, "seed": 5})
    result = sent.get(timeout=60)
    assert result["outputs"][0]["seed"] == 5
    assert sent.state == "SUCCESS"
    record = client.status(sent.id)
    assert record.state == "succeeded"
    assert Path(record.result.outputs[0].uri.removeprefix("file://")).exists()


@pytest.mark.usefixtures("cluster")
def test_a_bad_job_fails_with_the_reason_and_queues_nothing(app: Celery, client: JobClient) -> None:
    sent = app.send_task(TASK, kwargs={**JOB, "params": {"steps": -1}})
    with pytest.raises(InvalidJob, match=r"params\.steps: -1 is too small \(allowed: .*1.*100000\)"):
        sent.get(timeout=60)
    assert sum(client.counts().values()) == 0


@pytest.mark.usefixtures("cluster")
def test_a_message_whose_key_names_another_job_is_answered(app: Celery, client: JobClient) -> None:
    first = app.send_task(TASK, kwargs={**JOB, "idempotency_key": "k"})
    assert first.get(timeout=60)["outputs"]
    second = app.send_task(TASK, kwargs={**JOB, "idempotency_key": "k"})
    with pytest.raises(
        Conflict, match=f"idempotency_key: job {first.id} was submitted with it and another id"
    ):
        second.get(timeout=60)
    assert sum(client.counts().values()) == 1


@pytest.mark.usefixtures("cluster")
def test_a_failed_job_raises_in_whoever_waits(app: Celery) -> None:
    sent = app.send_task(TASK, kwargs={**JOB, "params": {"fail_at": "step", "fail_text": "told to"}})
    with pytest.raises(JobFailed, match="told to"):
        sent.get(timeout=60)
    assert sent.state == "FAILURE"


@pytest.mark.usefixtures("cluster")
def test_groups_and_chains_and_chords_go_along(app: Celery) -> None:
    def generate(prompt: str) -> signature:
        return app.signature(TASK, kwargs={**JOB, "prompt": prompt}, immutable=True)

    together = group([generate("a"), generate("b")], app=app).apply_async()
    assert len(together.get(timeout=60)) == 2
    one_by_one = chain(generate("c"), generate("d"), app=app).apply_async()
    assert one_by_one.get(timeout=60)["outputs"]
    assert one_by_one.parent.state == "SUCCESS"
    collected = chord([generate("e"), generate("f")], generate("g"), app=app).apply_async()
    assert collected.get(timeout=60)["outputs"]


@pytest.mark.usefixtures("cluster")
def test_revoke_cancels_the_job(app: Celery, client: JobClient) -> None:
    sent = app.send_task(TASK, kwargs={**JOB, "params": {"sleep_s": 0.2, "steps": 200}})
    until(lambda: client.counts()["running"] == 1, what="the job running")
    app.control.revoke(sent.id)
    assert client.wait(sent.id, 30).state == "cancelled"
    assert until(lambda: sent.state == "REVOKED")


def test_jobs_of_the_client_answer_to_async_result(
    app: Celery, client: JobClient, start_worker: StartWorker
) -> None:
    start_worker().ready("noop")
    job_id = client.submit(JOB).id
    assert app.AsyncResult(job_id).get(timeout=60)["outputs"]
