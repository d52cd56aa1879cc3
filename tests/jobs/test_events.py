"""Events: form, order, history for late readers, and what a reader is told who has missed something."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
import redis
from saggar.jobs import InvalidJob, JobClient, JobError, JobSettings, Ledger, UnknownJob

from tests.jobs.samples import make_job, make_result, submit


def run_through(ledger: Ledger, job_id: str, **values: object) -> None:
    submit(ledger, make_job(id=job_id, **values))
    ledger.start(job_id, "w1")
    ledger.progress(job_id, 1, 2, 4, data={"batch_id": "b1", "batch_size": 3})
    ledger.commit(job_id, 1, make_result(1))


def kinds(client: JobClient, job_id: str | None = None, **question: object) -> list[str]:
    return [event.kind for event in client.events(job_id, follow=False, **question)]  # type: ignore[arg-type]


def test_an_event_is_a_cloud_event(client: JobClient, ledger: Ledger) -> None:
    run_through(ledger, "j")
    progress = list(client.events("j", follow=False))[2]
    cloud = json.loads(progress.to_json())
    when = datetime.fromisoformat(cloud.pop("time"))
    assert when.tzinfo is not None
    assert cloud == {
        "specversion": "1.0",
        "id": "j/3",
        "source": "/saggar/jobs",
        "type": "saggar.job.progress",
        "subject": "j",
        "datacontenttype": "application/json",
        "data": {
            "job": "j",
            "attempt": 1,
            "sequence": 3,
            "step": 2,
            "steps": 4,
            "batch_id": "b1",
            "batch_size": 3,
        },
    }


def test_a_late_reader_sees_everything_in_order(client: JobClient, ledger: Ledger) -> None:
    run_through(ledger, "j")
    events = list(client.events("j"))  # following ends at the terminal event
    assert [e.kind for e in events] == ["submitted", "started", "progress", "succeeded"]
    assert [e.sequence for e in events] == [1, 2, 3, 4]
    assert sorted(e.cursor for e in events) == [e.cursor for e in events]
    assert [e.ended for e in events] == [False, False, False, True]
    assert events[-1].data["manifest"] == "s3://b/result.json"


def test_going_on_behind_a_cursor(client: JobClient, ledger: Ledger) -> None:
    run_through(ledger, "j")
    events = list(client.events("j", follow=False))
    for index, event in enumerate(events):
        rest = list(client.events("j", after=event.cursor, follow=False))
        assert rest == events[index + 1 :]


def test_a_run_has_one_stream(client: JobClient, ledger: Ledger) -> None:
    run_through(ledger, "a", run="r", priority="normal")
    run_through(ledger, "b", run="r", priority="bulk")
    run_through(ledger, "alone")
    told = [(e.job, e.kind) for e in client.events(run="r", follow=False)]
    assert told == [
        ("a", "submitted"),
        ("a", "started"),
        ("a", "progress"),
        ("a", "succeeded"),
        ("b", "submitted"),  # of bulk jobs in a run only the beginning and the end
        ("b", "succeeded"),
    ]
    assert kinds(client, "b") == ["submitted", "succeeded"]
    assert kinds(client, "a") == ["submitted", "started", "progress", "succeeded"]
    assert list(client.events(run="r", idle_s=0.01)) == list(client.events(run="r", follow=False))


def test_one_terminal_event_for_each_end(client: JobClient, ledger: Ledger) -> None:
    submit(ledger, make_job(id="j"))
    ledger.start("j", "w")
    ledger.fail("j", 1, JobError(kind="permanent", message="no"))
    client.retry("j")
    ledger.start("j", "w", put=2)
    ledger.commit("j", 2, make_result(2))
    expected = ["submitted", "started", "failed", "retrying", "started", "succeeded"]
    assert [e.kind for e in client.events("j")] == expected  # not stopped by the first end


def test_events_say_in_which_batch_a_job_runs(client: JobClient, ledger: Ledger) -> None:
    submit(ledger, make_job(id="j"))
    ledger.start("j", "w")
    batch: dict[str, str | int | float | None] = {"batch_id": "b1", "batch_size": 4}
    ledger.progress("j", 1, 0, 8, data=batch)
    ledger.progress("j", 1, 8, 8, kind="uploading", data=batch)
    ledger.commit("j", 1, make_result(1))
    _, _, *told = client.events("j")
    assert [(e.kind, e.data.get("step"), e.data["batch_id"], e.data["batch_size"]) for e in told] == [
        ("progress", 0, "b1", 4),
        ("uploading", 8, "b1", 4),
        ("succeeded", None, "b1", 2),
    ]


def test_unknown_job(client: JobClient) -> None:
    with pytest.raises(UnknownJob):
        list(client.events("nobody"))
    with pytest.raises(ValueError, match="one of job_id and run"):
        list(client.events("j", run="r"))


def test_a_trimmed_job_tells_what_is_missing(client: JobClient, ledger: Ledger, fake: redis.Redis) -> None:
    run_through(ledger, "j")
    entries = fake.xrange("saggar:events:job:j")
    fake.xdel("saggar:events:job:j", entries[0][0], entries[1][0])  # type: ignore[index]
    events = list(client.events("j"))
    assert [e.kind for e in events] == ["gap", "progress", "succeeded"]
    gap = events[0]
    assert gap.data["missed"] == 2
    snapshot = gap.data["snapshot"]
    assert isinstance(snapshot, dict)
    assert (snapshot["state"], snapshot["attempt"]) == ("succeeded", 1)
    assert "job" not in snapshot
    assert json.loads(gap.to_json())["type"] == "saggar.job.gap"


def test_a_hole_in_the_middle(client: JobClient, ledger: Ledger, fake: redis.Redis) -> None:
    run_through(ledger, "j")
    entries = fake.xrange("saggar:events:job:j")
    fake.xdel("saggar:events:job:j", entries[1][0])  # type: ignore[index]
    assert kinds(client, "j") == ["submitted", "gap", "progress", "succeeded"]


def test_a_cursor_that_is_gone(client: JobClient, ledger: Ledger, fake: redis.Redis) -> None:
    run_through(ledger, "j")
    events = list(client.events("j", follow=False))
    fake.xdel("saggar:events:job:j", events[0].cursor, events[1].cursor)
    assert kinds(client, "j", after=events[0].cursor) == ["gap", "progress", "succeeded"]


def test_an_expired_stream(client: JobClient, ledger: Ledger, fake: redis.Redis) -> None:
    run_through(ledger, "j")
    fake.delete("saggar:events:job:j")
    (gap,) = client.events("j", follow=False)
    assert (gap.kind, gap.data["missed"]) == ("gap", None)
    assert [e.kind for e in client.events("j")] == ["gap"]


def test_a_trimmed_run(client: JobClient, ledger: Ledger, fake: redis.Redis) -> None:
    for name in ("a", "b"):
        run_through(ledger, name, run="r")
    entries = fake.xrange("saggar:events:run:r")
    fake.xdel("saggar:events:run:r", entries[0][0])  # type: ignore[index]
    events = list(client.events(run="r", follow=False))
    assert [(e.job, e.kind) for e in events] == [
        (None, "gap"),
        ("a", "succeeded"),
        ("b", "submitted"),
        ("b", "succeeded"),
    ]
    assert events[0].data["missed"] == 1
    snapshot = events[0].data["snapshot"]
    assert isinstance(snapshot, dict)
    assert snapshot["succeeded"] == 2


def test_streams_are_bounded_and_expire(fake: redis.Redis) -> None:
    ledger = Ledger(fake, JobSettings.make(job_events_max=10, event_ttl_s=100))
    submit(ledger, make_job(id="j"))
    ledger.start("j", "w")
    assert fake.ttl("saggar:events:job:j") == -1  # an open job's history stays
    for step in range(500):
        ledger.progress("j", 1, step, 500)
    assert fake.xlen("saggar:events:job:j") < 250  # trimmed by whole blocks of a hundred
    ledger.commit("j", 1, make_result(1))
    assert 0 < fake.ttl("saggar:events:job:j") <= 100
    events = list(JobClient(ledger.ops._settings, fake).events("j"))
    assert (events[0].kind, events[-1].kind) == ("gap", "succeeded")


def test_events_of_what_cannot_be_are_refused_and_not_waited_for(client: JobClient) -> None:
    for job_id, run in (("", None), ("../x", None), (None, ""), (None, "../x"), (None, "a b")):
        with pytest.raises(InvalidJob, match=r"^id: has a form"):
            next(iter(client.events(job_id, run=run)))
