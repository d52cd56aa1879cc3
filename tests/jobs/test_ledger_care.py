"""The ledger's care for lanes and records: full lanes, lost messages, dead letters, other versions."""

from __future__ import annotations

import json

import pytest
import redis
from saggar.jobs import InvalidJob, JobSettings, Ledger, QueueFull, batch_key, check_job, reconcile
from saggar.jobs.ledger import NotStarted, Reconciled, Started
from saggar.jobs.ledger.parse import Ending

from tests.jobs.samples import CARD, SETTINGS, bury_letter, lane_messages, make_job, make_result, scan, submit
from tests.jobs.steps import BOOM, begin, celery_meta, retry


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
