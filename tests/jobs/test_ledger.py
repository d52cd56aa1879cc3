"""Transitions of the ledger, one by one: who wins, what is fenced, what a call that is sent twice does."""

from __future__ import annotations

import json

import pytest
import redis
from saggar.jobs import (
    InvalidJob,
    JobError,
    JobSettings,
    Ledger,
    QueueFull,
    batch_key,
    check_job,
    reconcile,
)
from saggar.jobs.desk import Desk
from saggar.jobs.ledger import NotStarted, Reconciled, Started, job_message
from saggar.jobs.ledger.parse import Cancelled, Ending, Submitted

from tests.jobs.samples import (
    CARD,
    SETTINGS,
    bury_letter,
    event_kinds,
    lane_messages,
    make_job,
    make_result,
    scan,
    submit,
)

BOOM = JobError(kind="permanent", message="it broke")


def begin(ledger: Ledger, job_id: str, token: str | None = None) -> int:
    started = ledger.start(job_id, "w1", token)
    assert isinstance(started, Started)
    return started.attempt


def retry(ledger: Ledger, job_id: str) -> None:
    """As a producer."""
    record = ledger.get(job_id)
    assert record is not None
    assert ledger.runner.run(Desk.of(SETTINGS).revival(record))


def celery_meta(fake: redis.Redis, job_id: str) -> dict[str, object]:
    return json.loads(fake.get(f"celery-task-meta-{job_id}"))  # type: ignore[arg-type]


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


def test_high_water(fake: redis.Redis) -> None:
    ledger = Ledger(fake, JobSettings.make(max_backlog=2, retry_after_s=7))
    for name in ("a", "b"):
        submit(ledger, make_job(id=name))
    with pytest.raises(QueueFull) as caught:
        submit(ledger, make_job(id="c"))
    assert (caught.value.retry_after_s, caught.value.backlog) == (7, 2)
    assert ledger.get("c") is None
    assert not submit(ledger, make_job(id="a")).created  # what is there already is no news
    assert lane_messages(fake) == {"a", "b"}


def test_a_full_lane_opens_again_at_its_low_water(fake: redis.Redis) -> None:
    ledger = Ledger(fake, JobSettings.make(max_backlog=4, low_water=0.5))
    for number in range(4):
        submit(ledger, make_job(id=f"j{number}"))
    for waiting in (4, 3):
        with pytest.raises(QueueFull) as caught:
            submit(ledger, make_job(id="late"))
        assert caught.value.backlog == waiting
        ledger.cancel(f"j{waiting - 1}")
        fake.hdel("saggar:gen.saggar--emoji:m", f"j{waiting - 1}")
    assert submit(ledger, make_job(id="late")).created
    assert submit(ledger, make_job(id="later")).created, "open up to the brim"


def test_interactive_jobs_have_room_beyond_the_brim(fake: redis.Redis) -> None:
    ledger = Ledger(fake, JobSettings.make(max_backlog=2))
    for name in ("a", "b"):
        submit(ledger, make_job(id=name))
    assert submit(ledger, make_job(id="now", priority="interactive")).created
    for priority in ("interactive", "normal"):
        with pytest.raises(QueueFull):
            submit(ledger, make_job(id="late", priority=priority))


def test_a_deadline_that_is_over_is_refused(ledger: Ledger, fake: redis.Redis) -> None:
    with pytest.raises(InvalidJob, match="deadline: is over already"):
        submit(ledger, make_job(id="j", deadline="2020-01-01T00:00:00Z"))
    assert not fake.keys()


def test_a_lost_message_is_put_again(ledger: Ledger, fake: redis.Redis) -> None:
    for name in ("waits", "runs", "fine", "ended"):
        submit(ledger, make_job(id=name))
    begin(ledger, "runs")
    ledger.cancel("ended")
    fake.delete(*fake.keys("saggar:gen.*"))  # type: ignore[misc]
    submit(ledger, make_job(id="new"))
    done = scan(ledger)
    assert (done.replaced, done.buried) == (3, 0)
    assert lane_messages(fake) == {"waits", "runs", "fine", "new"}
    assert scan(ledger).replaced == 0


def test_a_dead_letter_ends_its_job_and_goes(ledger: Ledger, fake: redis.Redis) -> None:
    submit(ledger, make_job(id="j"))
    bury_letter(fake, "j")
    assert scan(ledger).buried == 1
    record = ledger.get("j")
    assert record is not None
    assert record.error is not None
    assert (record.state, record.error.kind, record.dead) == ("failed", "dead_letter", True)
    assert lane_messages(fake) == set()
    assert not fake.exists("saggar:gen.saggar--emoji:x")


def test_a_job_whose_message_is_no_dead_letter_is_not_buried(ledger: Ledger) -> None:
    submit(ledger, make_job(id="j"))
    assert ledger.bury("j", BOOM) == Ending(False, "queued")


def test_a_job_with_another_message_is_not_buried(ledger: Ledger, fake: redis.Redis) -> None:
    submit(ledger, make_job(id="j"))
    assert ledger.retry("j", begin(ledger, "j"), BOOM, delay_s=60.0)
    bury_letter(fake, "j")  # the first message, which is stale
    assert ledger.bury("j", BOOM) == Ending(False, "queued")
    assert len(lane_messages(fake)) == 1
    assert scan(ledger) == Reconciled()


def test_a_retry_is_not_buried_by_the_dead_letter_before_it(ledger: Ledger, fake: redis.Redis) -> None:
    submit(ledger, make_job(id="j"))
    bury_letter(fake, "j")
    ledger.give_up("j", BOOM)  # not by that letter
    retry(ledger, "j")
    assert lane_messages(fake) == {"j"}
    assert (scan(ledger).buried, ledger.bury("j", BOOM).won) == (0, False)
    record = ledger.get("j")
    assert record is not None
    assert (record.state, record.position) == ("queued", 0)


def test_one_process_has_the_turn_and_scans_are_rarer(ledger: Ledger, fake: redis.Redis) -> None:
    """However many workers try every five seconds."""
    first, *others = (reconcile(ledger, SETTINGS, lambda _: CARD) for _ in range(10))
    assert first is not None
    assert others == [None] * 9
    assert 4_000 < fake.pttl("saggar:reconciler") <= 5_000
    assert 50_000 < fake.pttl("saggar:reconciler:scan") <= 60_000
    submit(ledger, make_job(id="j"))
    fake.delete("saggar:gen.saggar--emoji:m", "saggar:reconciler")
    assert (
        reconcile(ledger, SETTINGS, lambda _: CARD) == Reconciled()
    )  # the next turn, a minute too early to scan
    assert scan(ledger).replaced == 1


def test_a_job_that_a_card_completes_waits_under_the_key_it_is_compared_with(
    ledger: Ledger, fake: redis.Redis
) -> None:
    asked = make_job(id="j", allow_unserved=True)
    submit(ledger, asked)
    checked = check_job(asked, CARD)
    assert ledger.retry("j", begin(ledger, "j"), BOOM, CARD, job=checked)
    newest = fake.hget("saggar:gen.saggar--emoji:id", "j")
    record = str(fake.hget("saggar:gen.saggar--emoji:m", newest)).split("\x1f")
    assert record[7] == batch_key(checked, CARD) == '{"height":256,"task":"t2i","width":256}'
    started = ledger.start("j", "w", put=2)
    assert isinstance(started, Started)
    assert (started.job, started.digest) == (checked, asked.digest())


def test_the_first_message_is_refused_once_there_is_another(ledger: Ledger) -> None:
    submit(ledger, make_job(id="j"))
    ledger.cancel("j")
    retry(ledger, "j")
    assert ledger.start("j", "w") == NotStarted("stale")
    assert isinstance(ledger.start("j", "w", put=2), Started)
    assert ledger.start("j", "w") == NotStarted("stale")


@pytest.mark.parametrize("end", ["failed", "cancelled", "expired"])
@pytest.mark.parametrize("overdue", [False, True])
def test_what_has_ended_without_success_may_be_retried(
    ledger: Ledger, fake: redis.Redis, end: str, overdue: bool
) -> None:
    """A deadline that is over goes, for whoever tries again wants the result still; another one stays."""
    submit(ledger, make_job(id="j", deadline="2100-01-01T00:00:00Z"))
    attempt = begin(ledger, "j")
    if end == "failed":
        ledger.fail("j", attempt, BOOM)
    else:
        assert ledger.runner.run(ledger.ops.stopped("j", attempt, end)).state == end  # type: ignore[arg-type]
    if overdue:
        fake.hset("saggar:job:j", "deadline", 1)
    retry(ledger, "j")
    assert ledger.expire_due() == 0
    record = ledger.get("j")
    assert record is not None
    assert (record.state, record.job.deadline is None) == ("queued", overdue)
    assert (fake.zscore("saggar:deadlines", "j") is None) == overdue
    started = ledger.start("j", "w", put=2)
    assert isinstance(started, Started)
    assert not started.stopping
    assert ledger.commit("j", started.attempt, make_result(2)).won


def test_an_id_that_no_job_can_have_reaches_no_key(ledger: Ledger, fake: redis.Redis) -> None:
    for job_id in ("", "a b", "a:b", "../x", "x" * 129, "-x"):
        for call in (
            ledger.cancel,
            ledger.get,
            lambda i: ledger.start(i, "w"),
            lambda i: ledger.requeue(i, 1),
        ):
            with pytest.raises(InvalidJob, match=r"^id: has a form that is not allowed \(allowed: 1 to 128"):
                call(job_id)
    with pytest.raises(InvalidJob):
        ledger.check([("a b", 1)])
    assert not fake.keys()


def test_a_job_of_a_newer_producer(ledger: Ledger, fake: redis.Redis) -> None:
    """Fields that are not known are left out; what cannot be understood fails, and hides nobody else's record."""
    for name in ("newer", "broken", "lost", "fine"):
        submit(ledger, make_job(id=name))
    spec = json.loads(str(fake.get("saggar:spec:newer")))
    fake.set("saggar:spec:newer", json.dumps({**spec, "colour": "red", "output": {"depth": 16}}))
    for name in ("broken", "lost"):
        fake.set(f"saggar:spec:{name}", json.dumps({**spec, "id": name, "version": 2}))
    started = ledger.start("newer", "w")
    assert isinstance(started, Started)
    assert started.job == make_job(id="newer")

    answer = ledger.start("broken", "w")
    assert isinstance(answer, NotStarted)
    assert answer.error is not None
    assert (answer.reason, answer.state, answer.error.kind) == ("unreadable", "failed", "unreadable")
    assert answer.error.message.startswith("version: 2 is not one of the allowed values")
    assert celery_meta(fake, "broken")["status"] == "FAILURE"
    assert ledger.start("broken", "w") == NotStarted("ended", "failed")

    fake.hdel("saggar:gen.saggar--emoji:m", "lost", "fine")
    assert scan(ledger).replaced == 1
    assert fake.hget("saggar:job:lost", "state") == "failed"
    assert [record.id for record in ledger.list(state="failed").records] == []
    assert [record.id for record in ledger.list(state="queued").records] == ["fine"]


def test_a_result_of_a_newer_worker_is_read(ledger: Ledger, fake: redis.Redis) -> None:
    submit(ledger, make_job(id="j"))
    ledger.commit("j", begin(ledger, "j"), make_result(1))
    stored = json.loads(str(fake.get("saggar:result:j")))
    stored["colour"] = stored["outputs"][0]["colour"] = "red"
    fake.set("saggar:result:j", json.dumps(stored))
    record = ledger.get("j")
    assert record is not None
    assert record.result == make_result(1)


def test_counts(ledger: Ledger) -> None:
    for name in ("a", "b", "c"):
        submit(ledger, make_job(id=name, run="r" if name != "c" else None))
    begin(ledger, "b")
    assert {k: v for k, v in ledger.counts().items() if v} == {"queued": 2, "running": 1}
    assert {k: v for k, v in ledger.counts("r").items() if v} == {"queued": 1, "running": 1}
