"""Jobs sent by Celery's own means, without a worker: what the intake accepts, what `revoke` reaches."""

from __future__ import annotations

import fakeredis
import pytest
from celery import Celery
from celery.backends.base import Backend
from celery.worker import control
from saggar.jobs.cards import Cards
from saggar.jobs.errors import Conflict, SaggarError, UnknownModel
from saggar.jobs.ledger import TASK, Ledger
from saggar.jobs.schema import Job
from saggar.jobs.settings import JobSettings
from saggar.workers.chores import register_intake, submit_sent
from saggar.workers.tasks import register_revoke

SETTINGS = JobSettings()


@pytest.fixture
def redis_() -> fakeredis.FakeRedis:
    return fakeredis.FakeRedis(decode_responses=True)


@pytest.fixture
def ledger(redis_: fakeredis.FakeRedis) -> Ledger:
    return Ledger(redis_, SETTINGS)


@pytest.fixture
def cards(redis_: fakeredis.FakeRedis) -> Cards:
    return Cards(redis_, SETTINGS)


def job(job_id: str, **fields: object) -> Job:
    return Job.model_validate(
        {"id": job_id, "model": "noop", "prompt": "p", "allow_unserved": True, "seed": 1, **fields}
    )


def test_a_key_of_another_job_is_a_conflict(ledger: Ledger, cards: Cards) -> None:
    """Message J would otherwise wait for ever for a job J that there is not."""
    submit_sent(ledger, cards, job("first", idempotency_key="k"), "")
    submit_sent(ledger, cards, job("first", idempotency_key="k"), "")  # the same message once more
    with pytest.raises(
        Conflict, match="idempotency_key: job first was submitted with it and another id"
    ) as caught:
        submit_sent(ledger, cards, job("second", idempotency_key="k"), "")
    assert ledger.get("second") is None
    backend = Backend(app=Celery(set_as_current=False), serializer="json")
    there = backend.exception_to_python(backend.prepare_exception(caught.value, "json"))
    assert (type(there), str(there)) == (Conflict, str(caught.value))


def test_a_job_without_a_card_gets_its_seed(ledger: Ledger, cards: Cards) -> None:
    submit_sent(ledger, cards, job("j", seed=None), "")
    record = ledger.get("j")
    assert record is not None
    assert record.job.seed is not None
    with pytest.raises(UnknownModel):
        submit_sent(ledger, cards, job("other", allow_unserved=False), "")


def test_a_refusal_is_expected(ledger: Ledger, cards: Cards) -> None:
    """Celery logs it in one line, without a traceback."""
    app = Celery(set_as_current=False)
    register_intake(app, ledger, cards)
    assert app.tasks[TASK].throws == (SaggarError,)


def test_revoke_of_what_can_be_no_job_cancels_the_rest(
    ledger: Ledger, cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(control.Panel.data, "revoke", lambda state, task_id, **_: {"ok": task_id})
    register_revoke(ledger)
    submit_sent(ledger, cards, job("j"), "")
    assert control.Panel.data["revoke"](None, ["not a job's id", "j"]) == {"ok": ["not a job's id", "j"]}
    record = ledger.get("j")
    assert record is not None
    assert record.state == "cancelled"
