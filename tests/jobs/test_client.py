"""The client over a fake server: submit in bulk, pages, retry; the real one is in test_real_redis.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from saggar.jobs import (
    Cards,
    InvalidJob,
    Job,
    JobClient,
    JobError,
    JobFailed,
    Ledger,
    NotRetryable,
    Submitted,
    UnknownJob,
    WaitTimeout,
    desk,
)
from saggar.jobs.desk import CardCache

from tests.jobs.samples import CARD, MODEL, SETTINGS, lane_messages, make_job, make_result, submit


def ids_of(client: JobClient, **criteria: object) -> list[str]:
    """All pages."""
    out: list[str] = []
    cursor: str | None = None
    while True:
        page = client.list(cursor=cursor, **criteria)  # type: ignore[arg-type]
        out += [record.id for record in page.records]
        cursor = page.cursor
        if cursor is None:
            return out


def test_submit_fills_defaults_from_the_card(client: JobClient, fake: redis.Redis) -> None:
    done = client.submit({"model": MODEL, "prompt": "x", "params": {"width": 512}})
    record = client.status(done.id)
    assert record.job.params["height"] == 256
    assert record.job.seed is not None
    assert record.job.output.format == "png"
    keys = [str(key) for key in fake.keys("saggar:gen.saggar--emoji:w:*")]  # type: ignore[union-attr]
    assert keys == ['saggar:gen.saggar--emoji:w:2:{"height":256,"task":"t2i","width":512}']


def test_a_job_without_a_seed_is_the_same_job_again(client: JobClient) -> None:
    job = make_job(seed=None, idempotency_key="k")
    first = client.submit(job)
    again = client.submit(make_job(seed=None, idempotency_key="k"))
    assert (again.id, again.created, again.state) == (first.id, False, "queued")


def test_unserved_models_only_on_request(client: JobClient) -> None:
    with pytest.raises(InvalidJob, match="no card"):
        client.submit({"model": "some/other", "prompt": "x"})
    done = client.submit({"model": "some/other", "prompt": "x", "params": {"any": 1}, "allow_unserved": True})
    job = client.status(done.id).job
    assert job.params == {"any": 1}
    assert job.seed is not None


def test_a_card_published_later_is_seen(client: JobClient, fake: redis.Redis) -> None:
    with pytest.raises(InvalidJob):
        client.submit({"model": "late/model", "prompt": "x"})
    Cards(fake, SETTINGS).publish(CARD.model_copy(update={"model": "late/model"}), "w")
    assert client.submit({"model": "late/model", "prompt": "x"}).created
    assert client.models() == ["late/model", MODEL]


def test_submit_many_keeps_the_order(client: JobClient, fake: redis.Redis) -> None:
    jobs = [make_job(id=f"j{i:04}", seed=i) for i in range(1_050)]
    outcomes = list(client.submit_many(jobs, chunk=100))
    assert outcomes == [Submitted(job.id, True, "queued") for job in jobs]
    assert len(lane_messages(fake)) == 1_050
    assert client.status("j0007").position == 7
    assert ids_of(client, state="queued", newest_first=False) == [job.id for job in jobs]


def test_submit_many_tells_what_it_sent_before_its_source_failed(
    client: JobClient, fake: redis.Redis
) -> None:
    def source() -> Iterator[Job]:
        for number in range(25):
            yield make_job(id=f"j{number}")
        raise OSError("the disk is gone")

    outcomes = client.submit_many(source(), chunk=10)
    for number in range(25):
        assert next(outcomes) == Submitted(f"j{number}", True, "queued")
    with pytest.raises(OSError, match="the disk is gone"):
        next(outcomes)
    assert client.counts()["queued"] == 25


@pytest.mark.parametrize("chunk", [0, -1, 1.5, "10", None, True])
def test_submit_many_refuses_chunks_that_would_send_nothing(client: JobClient, chunk: object) -> None:
    with pytest.raises(InvalidJob, match=r"^chunk: .+ was given \(allowed: an integer, at least 1\)$"):
        list(client.submit_many([make_job()], chunk=chunk))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "one",
    [make_job(), make_job().to_json(), b"{}", {"model": MODEL, "prompt": "x"}],
    ids=["job", "JSON", "bytes", "dictionary"],
)
def test_submit_many_refuses_one_job(client: JobClient, one: object) -> None:
    with pytest.raises(InvalidJob, match=r"^jobs: .+ \(allowed: several jobs; submit takes one\)$"):
        list(client.submit_many(one))  # type: ignore[arg-type]


def test_a_card_that_is_read_anew_is_never_missing_to_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = CardCache(keep_s=-1.0)
    seen: list[bool] = []
    monkeypatch.setattr(desk, "parse_card", lambda text: seen.append(MODEL in cards) or CARD)
    for _ in range(2):
        assert cards.missing([make_job()]) == [MODEL]
        cards.add([MODEL], [CARD.model_dump_json()])
    assert seen == [False, True]


def test_a_model_whose_card_went_a_moment_ago_is_refused(client: JobClient) -> None:
    at = client._desk
    client.submit(make_job(id="a"))
    at.cards.add([MODEL], [None])
    with pytest.raises(InvalidJob, match="no worker has served"):
        at.submission(make_job(id="b"), [])


def test_submit_many_that_nobody_reads_on_sends_no_more(client: JobClient, fake: redis.Redis) -> None:
    outcomes = client.submit_many((make_job(seed=i) for i in range(30)), chunk=10)
    next(outcomes)
    outcomes.close()
    assert client.counts()["queued"] == 10


def test_submit_many_sends_nothing_before_it_is_iterated(client: JobClient, fake: redis.Redis) -> None:
    jobs = client.submit_many(make_job(seed=i) for i in range(30))
    assert not lane_messages(fake)
    next(jobs)
    assert len(lane_messages(fake)) == 30


def test_scripts_forgotten_by_the_server_are_sent_again(client: JobClient, fake: redis.Redis) -> None:
    client.submit(make_job(id="a"))
    fake.script_flush()
    client.submit(make_job(id="b"))
    fake.script_flush()
    assert all(isinstance(o, Submitted) for o in client.submit_many([make_job(id="c")]))
    assert lane_messages(fake) == {"a", "b", "c"}


def test_pages(client: JobClient, ledger: Ledger) -> None:
    names = [f"j{i:03}" for i in range(25)]
    for i, name in enumerate(names):
        tags = ["even"] if i % 2 == 0 else []
        submit(ledger, make_job(id=name, run="r1" if i < 15 else "r2", tags=tags, tenant="t"))
    for name in names[:4]:
        ledger.cancel(name)
    for limit in (1, 7, 25, 100):
        assert ids_of(client, tenant="t", limit=limit) == names[::-1]
        assert ids_of(client, run="r1", limit=limit, newest_first=False) == names[:15]
        assert ids_of(client, tag="even", run="r2", limit=limit) == names[16::2][::-1]
        assert ids_of(client, state="cancelled", limit=limit, newest_first=False) == names[:4]
        assert (
            ids_of(client, run="r1", tag="even", state="queued", limit=limit, newest_first=False)
            == names[4:15:2]
        )
    assert ids_of(client, run="nothing") == []


def test_a_page_goes_on_when_its_last_job_has_moved(client: JobClient, ledger: Ledger) -> None:
    names = [f"j{i}" for i in range(6)]
    for name in names:
        submit(ledger, make_job(id=name))
    first = client.list(state="queued", limit=3, newest_first=False)
    ledger.cancel("j2")
    ledger.cancel("j0")
    rest = client.list(state="queued", limit=3, newest_first=False, cursor=first.cursor)
    assert [r.id for r in rest.records] == ["j3", "j4", "j5"]


@pytest.mark.parametrize(
    ("criteria", "field"),
    [
        ({}, "criteria"),
        ({"state": "done"}, "state"),
        ({"state": "queued", "limit": 0}, "limit"),
        ({"state": "queued", "limit": 1001}, "limit"),
        ({"state": "queued", "cursor": "zzz"}, "cursor"),
    ],
)
def test_wrong_criteria(client: JobClient, criteria: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        client.list(**criteria)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_unknown(client: JobClient) -> None:
    for call in (client.status, client.wait, client.result, client.retry):
        with pytest.raises(UnknownJob):
            call("nobody")


def test_wait_and_result_of_an_ended_job(client: JobClient, ledger: Ledger) -> None:
    for name in ("good", "bad", "stopped", "open"):
        submit(ledger, make_job(id=name))
        ledger.start(name, "w")
    ledger.commit("good", 1, make_result(1))
    ledger.fail("bad", 1, JobError(kind="permanent", message="no"))
    ledger.stopped("stopped", 1)
    assert client.wait("good").state == "succeeded"
    assert client.result("good") == make_result(1)
    with pytest.raises(JobFailed, match="job bad failed: permanent: no") as caught:
        client.result("bad")
    assert caught.value.record is not None
    assert caught.value.record.state == "failed"
    with pytest.raises(JobFailed, match="job stopped cancelled"):
        client.result("stopped")
    with pytest.raises(WaitTimeout):
        client.wait("open", timeout_s=0)


def test_retry(client: JobClient, ledger: Ledger, fake: redis.Redis) -> None:
    client.submit(make_job(id="j", idempotency_key="k"))
    with pytest.raises(NotRetryable, match="queued"):
        client.retry("j")
    ledger.start("j", "w")
    ledger.progress("j", 1, 0, 4)
    ledger.start("j", "w")
    ledger.fail("j", 2, JobError(kind="permanent", message="no"), dead=True)
    assert fake.exists("celery-task-meta-j")
    assert client.retry("j") == Submitted("j", True, "queued")
    record = client.status("j")
    assert (record.state, record.attempt, record.suspicions, record.dead, record.error) == (
        "queued",
        2,
        0,
        False,
        None,
    )
    assert not fake.exists("celery-task-meta-j")
    assert fake.ttl("saggar:job:j") == -1
    assert fake.ttl("saggar:events:job:j") == -1
    assert client.list(dead=True).records == []
    assert not client.submit(make_job(idempotency_key="k")).created  # the key still names this job
    ledger.start("j", "w", put=2)
    assert ledger.commit("j", 3, make_result(3)).won
    with pytest.raises(NotRetryable, match="succeeded"):
        client.retry("j")


def test_old_records_make_room(ledger: Ledger, fake: redis.Redis, client: JobClient) -> None:
    for name in ("old", "new"):
        submit(ledger, make_job(id=name, run="r", tags=["x"], tenant="t", idempotency_key=name))
        ledger.start(name, "w")
    ledger.commit("old", 1, make_result(1))
    fake.zadd("saggar:state:succeeded", {"old": 1})  # long ago
    ledger.commit("new", 1, make_result(1))
    assert ledger.get("old") is None
    assert fake.keys("*old*") == ["celery-task-meta-old"]
    for key in ("saggar:run:r", "saggar:tag:x", "saggar:tenant:t", "saggar:state:succeeded"):
        assert fake.zrange(key, 0, -1) == ["new"]
    with pytest.raises(UnknownJob):
        client.status("old")


def test_a_listing_clears_what_outlived_its_record(
    ledger: Ledger, fake: redis.Redis, client: JobClient
) -> None:
    for name in ("a", "b"):
        submit(ledger, make_job(id=name, run="r"))
    fake.delete("saggar:job:a")
    assert ids_of(client, run="r") == ["b"]
    assert fake.zrange("saggar:run:r", 0, -1) == ["b"]
