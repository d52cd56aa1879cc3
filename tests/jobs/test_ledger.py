"""Transitions of the ledger, one by one: who wins, what is fenced, what a call that is sent twice does."""

from __future__ import annotations

import pytest
import redis
from saggar.jobs import Ledger
from saggar.jobs.ledger import NotStarted, Started, job_message
from saggar.jobs.ledger.parse import Cancelled, Ending, Submitted

from tests.jobs.samples import CARD, event_kinds, lane_messages, make_job, make_result, submit
from tests.jobs.steps import BOOM, begin, celery_meta


def test_submit_writes_record_message_and_event(ledger: Ledger, fake: redis.Redis) -> None:
    job = make_job(id="j", tags=["x"], tenant="t")
    assert submit(ledger, job) == Submitted("j", True, "queued")
    record = ledger.get("j")
    assert record is not None
    assert (record.job, record.state, record.attempt, record.position) == (job, "queued", 0, 0)
    assert record.digest == job.digest()
    assert lane_messages(fake) == {"j"}
    assert event_kinds(fake, "j") == ["submitted"]
    assert submit(ledger, job) == Submitted("j", False, "queued")
    assert event_kinds(fake, "j") == ["submitted"]


def test_a_submit_that_is_sent_twice_still_says_created(ledger: Ledger, fake: redis.Redis) -> None:
    job = make_job(id="j")
    message = job_message(job, CARD)
    for _ in range(2):
        assert ledger.submit(job, message, job.digest()) == Submitted("j", True, "queued")
    assert lane_messages(fake) == {"j"}


def test_an_unknown_job_is_unknown(ledger: Ledger) -> None:
    assert ledger.get("nobody") is None
    assert ledger.start("nobody", "w") == NotStarted("unknown")
    assert ledger.commit("nobody", 1, make_result(1)) == Ending(False, None)
    assert ledger.progress("nobody", 1, 0, 4) == "fenced"
    assert not ledger.requeue("nobody", 1)
    assert not ledger.retry("nobody", 1, BOOM)


def test_the_whole_way(ledger: Ledger, fake: redis.Redis) -> None:
    submit(ledger, make_job(id="j"))
    attempt = begin(ledger, "j")
    assert ledger.progress("j", attempt, 0, 4) == "go"
    assert ledger.progress("j", attempt, 2, 4, kind="") == "go"
    record = ledger.get("j")
    assert record is not None
    assert record.progress is not None
    assert (record.progress.step, record.owner, record.position) == (2, "w1", None)
    assert ledger.commit("j", attempt, make_result(attempt)) == Ending(True, "succeeded")
    record = ledger.get("j")
    assert record is not None
    assert record.result == make_result(attempt)
    assert record.times.started is not None
    assert record.times.finished is not None
    assert record.times.submitted <= record.times.started <= record.times.finished
    assert event_kinds(fake, "j") == ["submitted", "started", "progress", "succeeded"]
    meta = celery_meta(fake, "j")
    assert (meta["status"], meta["task_id"]) == ("SUCCESS", "j")
    assert meta["result"]["manifest"] == "s3://b/result.json"  # type: ignore[index]


def test_start_with_the_same_delivery_is_the_same_attempt(ledger: Ledger, fake: redis.Redis) -> None:
    submit(ledger, make_job(id="j"))
    assert begin(ledger, "j", "delivery-1") == 1
    assert begin(ledger, "j", "delivery-1") == 1
    assert begin(ledger, "j", "delivery-2") == 2
    assert event_kinds(fake, "j") == ["submitted", "started", "started"]


def test_only_an_attempt_that_was_executing_raises_suspicion(ledger: Ledger) -> None:
    submit(ledger, make_job(id="j"))
    begin(ledger, "j")
    started = ledger.start("j", "w2")  # the first worker vanished before its engine began
    assert isinstance(started, Started)
    assert started.suspicions == 0
    ledger.progress("j", 2, 0, 4)
    started = ledger.start("j", "w3")
    assert isinstance(started, Started)
    assert (started.attempt, started.suspicions) == (3, 1)


def test_a_worker_that_takes_a_job_up_again_itself_has_not_died_of_it(ledger: Ledger) -> None:
    submit(ledger, make_job(id="j"))
    first = begin(ledger, "j")
    ledger.progress("j", first, 1, 4)
    again = ledger.start("j", "w1")
    assert isinstance(again, Started)
    assert (again.attempt, again.suspicions, again.crashed) == (2, 0, False)
    ledger.progress("j", 2, 1, 4)
    assert not ledger.disown("j", first), "fenced"
    assert ledger.disown("j", 2)
    third = ledger.start("j", "w1")
    assert isinstance(third, Started)
    assert (third.attempt, third.suspicions, third.crashed) == (3, 1, True)


def test_a_fenced_attempt_changes_nothing(ledger: Ledger, fake: redis.Redis) -> None:
    submit(ledger, make_job(id="j"))
    old = begin(ledger, "j")
    new = begin(ledger, "j")
    before = fake.hgetall("saggar:job:j")
    assert ledger.progress("j", old, 1, 4) == "fenced"
    assert ledger.check([("j", old), ("j", new)]) == {"j": "go"}
    assert ledger.check([("j", old)]) == {"j": "fenced"}
    assert not ledger.requeue("j", old)
    assert not ledger.retry("j", old, BOOM)
    assert ledger.fail("j", old, BOOM) == Ending(False, "running")
    assert ledger.commit("j", old, make_result(old)) == Ending(False, "running")
    assert fake.hgetall("saggar:job:j") == before
    assert ledger.commit("j", new, make_result(new)).won
    assert ledger.commit("j", old, make_result(old)) == Ending(False, "succeeded")


def test_a_commit_that_is_sent_twice_wins_twice_and_is_seen_once(ledger: Ledger, fake: redis.Redis) -> None:
    submit(ledger, make_job(id="j"))
    attempt = begin(ledger, "j")
    for _ in range(2):
        assert ledger.commit("j", attempt, make_result(attempt)) == Ending(True, "succeeded")
    assert ledger.fail("j", attempt, BOOM) == Ending(False, "succeeded")
    assert event_kinds(fake, "j").count("succeeded") == 1


def test_failure(ledger: Ledger, fake: redis.Redis) -> None:
    submit(ledger, make_job(id="j"))
    assert ledger.fail("j", begin(ledger, "j"), BOOM, dead=True) == Ending(True, "failed")
    record = ledger.get("j")
    assert record is not None
    assert (record.error, record.dead) == (BOOM, True)
    assert [r.id for r in ledger.list(dead=True).records] == ["j"]
    meta = celery_meta(fake, "j")
    assert meta["status"] == "FAILURE"
    assert meta["result"] == {
        "exc_type": "JobFailed",
        "exc_message": ["permanent: it broke"],
        "exc_module": "saggar.jobs.errors",
    }


def test_a_retry_counts_the_suspicions_that_it_is_told(ledger: Ledger) -> None:
    submit(ledger, make_job(id="j"))
    attempt = begin(ledger, "j")
    for _ in range(2):  # sent twice is counted once
        assert ledger.retry("j", attempt, BOOM, suspicions=2)
    assert ledger.get("j").suspicions == 2
    again = ledger.start("j", "w1", None, 2)
    assert isinstance(again, Started)
    assert again.suspicions == 2
    assert ledger.retry("j", again.attempt, BOOM)
    assert ledger.get("j").suspicions == 2


def test_requeue_gives_back_without_a_new_message(ledger: Ledger, fake: redis.Redis) -> None:
    submit(ledger, make_job(id="j"))
    attempt = begin(ledger, "j")
    ledger.progress("j", attempt, 1, 4)
    for _ in range(2):
        assert ledger.requeue("j", attempt)
    record = ledger.get("j")
    assert record is not None
    assert (record.state, record.owner, record.progress, record.put) == ("queued", None, None, 1)
    assert event_kinds(fake, "j")[-1] == "requeued"
    assert ledger.commit("j", attempt, make_result(attempt)) == Ending(False, "queued")
    assert begin(ledger, "j") == 2


def test_retry_puts_a_new_message_and_makes_the_old_one_stale(ledger: Ledger, fake: redis.Redis) -> None:
    submit(ledger, make_job(id="j"), extras='{"headers": {"group": "g"}, "embed": {"callbacks": []}}')
    attempt = begin(ledger, "j")
    for _ in range(2):
        assert ledger.retry("j", attempt, BOOM)
    assert len(lane_messages(fake)) == 2
    assert ledger.start("j", "w", put=1) == NotStarted("stale")
    started = ledger.start("j", "w", put=2)
    assert isinstance(started, Started)
    assert started.attempt == 2
    bodies = "".join(fake.hvals("saggar:gen.saggar--emoji:m"))  # type: ignore[arg-type]
    assert bodies.count('"group":"g"') == 2
    assert bodies.count('"job_put":2') == 1
    assert event_kinds(fake, "j") == ["submitted", "started", "retrying", "started"]


def test_cancel_of_a_waiting_job(ledger: Ledger, fake: redis.Redis) -> None:
    submit(ledger, make_job(id="first"))
    submit(ledger, make_job(id="j"))
    assert ledger.cancel("j") == Cancelled("done", "cancelled")
    assert ledger.cancel("j") == Cancelled("ended", "cancelled")
    assert ledger.start("j", "w") == NotStarted("ended", "cancelled")
    assert event_kinds(fake, "j") == ["submitted", "cancelled"]
    assert fake.zrange("saggar:gen.saggar--emoji:a:-1", 0, -1) == ["j"]  # at the head, to be taken out
    meta = celery_meta(fake, "j")
    assert meta["status"] == "REVOKED"


def test_cancel_of_a_running_job(ledger: Ledger, fake: redis.Redis) -> None:
    submit(ledger, make_job(id="j"))
    attempt = begin(ledger, "j")
    with fake.pubsub(ignore_subscribe_messages=True) as wire:
        wire.subscribe("saggar:cancel")
        wire.get_message(timeout=1)
        assert ledger.cancel("j") == Cancelled("requested", "running", "w1")
        message = wire.get_message(timeout=1)
    assert message is not None
    assert message["data"] == "j"
    assert ledger.progress("j", attempt, 1, 4) == "cancel"
    assert ledger.stopped("j", attempt) == Ending(True, "cancelled")


@pytest.mark.parametrize("way", ["start", "requeue", "retry"])
def test_a_cancelled_job_does_not_come_back(ledger: Ledger, way: str) -> None:
    submit(ledger, make_job(id="j"))
    attempt = begin(ledger, "j")
    ledger.cancel("j")
    if way == "start":
        again = ledger.start("j", "w2")  # whose manifest may stand: the worker looks before it ends the job
        assert isinstance(again, Started)
        assert again.stopping
        assert ledger.stopped("j", again.attempt).won
    elif way == "requeue":
        assert ledger.requeue("j", attempt)
    else:
        assert ledger.retry("j", attempt, BOOM)
    record = ledger.get("j")
    assert record is not None
    assert record.state == "cancelled"


def test_a_result_that_is_already_written_beats_a_cancel(ledger: Ledger) -> None:
    submit(ledger, make_job(id="j"))
    attempt = begin(ledger, "j")
    ledger.cancel("j")
    assert ledger.commit("j", attempt, make_result(attempt)) == Ending(True, "succeeded")


def test_a_cancel_that_comes_before_its_job(ledger: Ledger, fake: redis.Redis) -> None:
    assert ledger.cancel("j") == Cancelled("unknown")
    assert ledger.get("j") is None
    assert submit(ledger, make_job(id="j")) == Submitted("j", True, "cancelled")
    assert event_kinds(fake, "j") == ["submitted", "cancelled"]
    assert lane_messages(fake) == set()
