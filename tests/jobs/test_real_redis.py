"""What only a real server shows: time, waiting, two clients, a crash, what Celery reads, what a job costs."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis
from redis.client import Pipeline
from saggar.jobs import (
    AsyncJobClient,
    Cards,
    Event,
    Job,
    JobClient,
    JobError,
    JobFailed,
    JobSettings,
    Ledger,
    SaggarError,
    Submitted,
    WaitTimeout,
    connect,
)
from saggar.jobs.ledger import Started
from saggar.workers.servers import RedisServer

from tests.jobs.samples import CARD, event_kinds, lane_messages, make_job, make_result, submit
from tests.support.wait import until

pytestmark = pytest.mark.e2e


def execute(settings: JobSettings, job_id: str) -> None:
    """A worker's part, over a connection of its own."""
    with connect(settings) as client:
        ledger = Ledger(client, settings)
        started = ledger.start(job_id, "w1")
        assert isinstance(started, Started)
        for step in range(3):
            ledger.progress(job_id, started.attempt, step, 3)
        ledger.commit(job_id, started.attempt, make_result(started.attempt))


def test_a_follower_in_another_thread_sees_everything(
    real_client: JobClient, real_settings: JobSettings, real: redis.Redis
) -> None:
    job = real_client.submit(make_job())
    seen: list[Event] = []
    first = threading.Event()

    def follow() -> None:
        with JobClient(real_settings) as client:
            for event in client.events(job.id):
                seen.append(event)
                first.set()

    reader = threading.Thread(target=follow)
    reader.start()
    assert first.wait(20)
    execute(real_settings, job.id)
    reader.join(20)
    assert not reader.is_alive()
    kinds = [e.kind for e in seen]
    assert kinds == ["submitted", "started", "progress", "progress", "progress", "succeeded"]
    assert [e.sequence for e in seen] == [1, 2, 3, 4, 5, 6]


def test_wait_wakes_up_at_the_end(real_client: JobClient, real_settings: JobSettings) -> None:
    job = real_client.submit(make_job())
    with ThreadPoolExecutor() as pool:
        record = pool.submit(real_client.wait, job.id, 30)
        execute(real_settings, job.id)
        assert record.result(30).state == "succeeded"
    other = real_client.submit(make_job())
    with pytest.raises(WaitTimeout):
        real_client.wait(other.id, timeout_s=0.05)


def test_the_async_client_does_the_same(real_settings: JobSettings, real: redis.Redis) -> None:
    async def scenario() -> None:
        async with AsyncJobClient(real_settings) as client:
            job = await client.submit(make_job(run="r", priority="normal"))
            outcomes = [
                o async for o in client.submit_many([make_job(id=f"j{i}") for i in range(20)] + ["{"])
            ]
            assert [isinstance(o, Submitted) for o in outcomes] == [True] * 20 + [False]
            waiting = asyncio.create_task(client.wait(job.id, 30))
            result = asyncio.create_task(client.result(job.id, 30))
            following = asyncio.create_task(_collect(client, job.id))
            await asyncio.to_thread(execute, real_settings, job.id)
            assert (await waiting).state == "succeeded"
            assert (await result) == make_result(1)
            assert (await following)[-1] == "succeeded"
            assert (await anext(client.events(run="r", follow=False))).kind == "submitted"
            assert (await client.cancel("j3")).outcome == "done"
            with pytest.raises(JobFailed):
                await client.result("j3")
            assert (await client.retry("j3")).state == "queued"
            assert (await client.status("j3")).put == 2
            assert len((await client.list(state="queued")).records) == 20
            assert (await client.counts())["succeeded"] == 1
            assert list(await client.models()) == ["saggar/emoji"]

    async def _collect(client: AsyncJobClient, job_id: str) -> list[str]:
        return [event.kind async for event in client.events(job_id)]

    asyncio.run(scenario())


def test_celery_reads_the_results(real: redis.Redis, real_ledger: Ledger, real_settings: JobSettings) -> None:
    from celery import Celery
    from celery.exceptions import TaskRevokedError

    app = Celery(broker=real_settings.redis_url, backend=real_settings.redis_url)
    for name in ("good", "bad", "gone", "late"):
        submit(real_ledger, make_job(id=name))
        assert app.AsyncResult(name).state == "PENDING"
        real_ledger.start(name, "w")
    waiting = app.AsyncResult("good")
    with ThreadPoolExecutor() as pool:
        value = pool.submit(waiting.get, timeout=30)
        real_ledger.commit("good", 1, make_result(1))
        assert value.result(30)["manifest"] == "s3://b/result.json"
    assert waiting.state == "SUCCESS"
    assert abs(waiting.date_done - datetime.now(UTC)) < timedelta(minutes=5)

    real_ledger.fail("bad", 1, JobError(kind="out_of_memory", message="no room"))
    with pytest.raises(JobFailed, match="out_of_memory: no room"):
        app.AsyncResult("bad").get(timeout=30)
    assert app.AsyncResult("bad").state == "FAILURE"

    real_ledger.stopped("gone", 1)
    real_ledger.expire("late", 1)
    for name, reason in (("gone", "cancelled"), ("late", "expired")):
        with pytest.raises(TaskRevokedError, match=reason):
            app.AsyncResult(name).get(timeout=30)
        assert app.AsyncResult(name).state == "REVOKED"


def test_deadlines_pass_on_the_servers_clock(real_ledger: Ledger, real: redis.Redis) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=0.5)
    for name in ("waits", "runs", "unswept"):
        submit(real_ledger, make_job(id=name, deadline=soon))
    real_ledger.start("runs", "w")
    assert real_ledger.progress("runs", 1, 0, 4) == "go"
    real.zrem("saggar:deadlines", "unswept")
    until(lambda: real_ledger.expire_due() == 2)
    record = real_ledger.get("waits")
    assert record is not None
    assert record.state == "expired"
    assert real_ledger.progress("runs", 1, 1, 4) == "deadline"
    assert real_ledger.stopped("runs", 1).state == "expired"
    answer = real_ledger.start("unswept", "w")  # the start looks too
    assert not isinstance(answer, Started)
    assert answer.state == "expired"
    assert event_kinds(real, "waits") == ["submitted", "expired"]


def test_a_waiting_job_keeps_its_time(real_ledger: Ledger, real: redis.Redis) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    submit(real_ledger, make_job(id="j", not_before=later))
    due = real.zscore("saggar:gen.saggar--emoji:d", "j")
    assert due == round(later.timestamp() * 1e6)
    record = real_ledger.get("j")
    assert record is not None
    assert record.position is None


def test_records_and_results_expire(redis_url: str) -> None:
    settings = JobSettings.make(redis_url=redis_url, record_ttl_s=1, event_ttl_s=1, result_ttl_s=1)
    with connect(settings) as client:
        ledger = Ledger(client, settings)
        submit(ledger, make_job(id="j", run="r"))
        ledger.cancel("j")
        assert 0 < client.pttl("saggar:job:j") <= 1_000 + 86_400_000
        until(lambda: not client.exists("celery-task-meta-j", "saggar:events:run:r"))
        until(lambda: ledger.prune() == 1)
        assert ledger.get("j") is None
        assert not client.keys("saggar:[^g]*")  # nothing is left but the lane's message, which says "unknown"


def test_one_of_many_racing_commits_wins(
    real_settings: JobSettings, real_ledger: Ledger, real: redis.Redis
) -> None:
    submit(real_ledger, make_job(id="j"))
    attempts = []
    for _ in range(8):
        started = real_ledger.start("j", "w")
        assert isinstance(started, Started)
        attempts.append(started.attempt)
    barrier = threading.Barrier(8)

    def commit(attempt: int) -> bool:
        with connect(real_settings) as client:
            ledger = Ledger(client, real_settings)
            barrier.wait(20)
            return ledger.commit("j", attempt, make_result(attempt)).won

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(commit, attempts)) == [False] * 7 + [True]
    assert event_kinds(real, "j").count("succeeded") == 1


def test_what_was_accepted_survives_a_killed_server(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        settings = JobSettings.make(redis_url=server.url)
        client = JobClient(settings)
        jobs = [make_job(id=f"j{i}", allow_unserved=True) for i in range(200)]
        assert all(isinstance(o, Submitted) for o in client.submit_many(jobs, chunk=50))
        server.kill()
        server.start()
        with connect(settings) as after:
            assert lane_messages(after) == {job.id for job in jobs}
            assert client.counts()["queued"] == 200
            assert event_kinds(after, "j199") == ["submitted"]


def answered(client: JobClient, job: Job) -> bool:
    try:
        client.submit(job)
    except redis.RedisError:
        return False
    return True


def test_submits_through_a_crash_are_made_once(tmp_path: Path) -> None:
    """Every call that failed is made again until it is answered, as the client library does by itself."""
    with RedisServer(tmp_path) as server:
        settings = JobSettings.make(redis_url=server.url)
        client = JobClient(settings)
        enough = threading.Event()

        def crash() -> None:
            enough.wait(20)
            server.kill()
            server.start()

        crasher = threading.Thread(target=crash)
        crasher.start()
        for i in range(300):
            job = make_job(id=f"j{i}", allow_unserved=True)
            until(lambda job=job: answered(client, job))
            if i == 100:
                enough.set()
        crasher.join(30)
        with connect(settings) as after:
            assert lane_messages(after) == {f"j{i}" for i in range(300)}
            assert all(event_kinds(after, f"j{i}") == ["submitted"] for i in range(300))


def test_another_database_user_and_prefix(real: redis.Redis, redis_url: str) -> None:
    real.acl_setuser(
        "jobs", enabled=True, passwords=["+secret"], keys=["*"], channels=["*"], commands=["+@all"]
    )
    host = redis_url.partition("@")[2].partition("/")[0]
    settings = JobSettings.make(redis_url=f"redis://jobs:secret@{host}/3", key_prefix="other:")
    with JobClient(settings) as client, connect(settings) as own:
        job = client.submit(make_job(allow_unserved=True))
        assert client.status(job.id).position == 0
        assert all(str(key).startswith("other:") for key in own.keys())  # noqa: SIM118
        own.flushdb()
    assert real.dbsize() > 0  # the sample card, in the other database


def test_a_unix_socket(tmp_path: Path) -> None:
    import subprocess

    from saggar.workers.servers import find_binary

    path = tmp_path / "r"
    command = [find_binary(), "--port", "0", "--unixsocket", str(path), "--dir", str(tmp_path), "--save", ""]
    with subprocess.Popen([*command, "--requirepass", "pw"], stdout=subprocess.DEVNULL) as process:
        try:
            until(path.exists)
            with JobClient(f"unix://:pw@{path}?db=2") as client:
                assert client.submit(make_job(allow_unserved=True)).created
        finally:
            process.terminate()


@pytest.mark.parametrize("run", [None, "r"])
def test_a_waiting_job_costs_less_than_3_kb(
    real_client: JobClient, real: redis.Redis, run: str | None
) -> None:
    prompt = "a watercolour of a cat that sits on a mat in the evening sun"
    jobs = [make_job(id=f"{i:032}", prompt=prompt, seed=i, run=run) for i in range(10_000)]
    before = real.info("memory")["used_memory"]
    assert all(isinstance(o, Submitted) for o in real_client.submit_many(jobs))
    assert (real.info("memory")["used_memory"] - before) / len(jobs) < 3_000


def test_a_page_costs_the_same_among_many(real_client: JobClient, real: redis.Redis) -> None:
    """Counted in looked-at entries: commands of the server, not seconds."""

    def commands_of_a_page() -> int:
        before = real.info("commandstats")
        assert len(real_client.list(state="queued", limit=50).records) == 50
        after = real.info("commandstats")
        count = ("cmdstat_hgetall", "cmdstat_zrevrange", "cmdstat_zscore")
        return sum(after.get(c, {"calls": 0})["calls"] - before.get(c, {"calls": 0})["calls"] for c in count)

    assert all(
        isinstance(o, Submitted) for o in real_client.submit_many(make_job(seed=i) for i in range(100))
    )
    few = commands_of_a_page()
    assert all(
        isinstance(o, Submitted) for o in real_client.submit_many(make_job(seed=i) for i in range(5_000))
    )
    assert commands_of_a_page() == few


def test_a_fork_amid_submit_many_goes_on_in_one_process(real_client: JobClient) -> None:
    """Its other process, which has no thread that sends, says so and does not hang."""
    outcomes = real_client.submit_many((make_job(id=f"j{i}") for i in range(10)), chunk=4)
    assert next(outcomes) == Submitted("j0", True, "queued")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            next(outcomes)
        except SaggarError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        assert said.read() == "submit_many was begun in another process: call it again in this one"
    assert os.waitpid(child, 0) == (child, 0)
    assert [one.id for one in outcomes if isinstance(one, Submitted)] == [f"j{i}" for i in range(1, 10)]


class Dying(redis.Redis):
    """Its server dies when it has executed `left` commands of a pipeline more."""

    left = 10**6

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        client, pipe = self, super().pipeline(transaction, shard_hint)
        execute = pipe.execute

        def partly(raise_on_error: bool = True) -> list[object]:
            stack = pipe.command_stack
            if len(stack) <= client.left:
                client.left -= len(stack)
                return execute(raise_on_error)
            pipe.command_stack = stack[: client.left]
            execute(raise_on_error)
            raise redis.ConnectionError("gone")

        pipe.execute = partly  # type: ignore[method-assign]
        return pipe


@pytest.mark.parametrize("left", [0, 1, 3, 4, 6, 9])
def test_what_redis_took_of_many_before_it_died_is_found_again(real_settings: JobSettings, left: int) -> None:
    with connect(real_settings) as plain:
        Cards(plain, real_settings).publish(CARD, "w1")
        list(JobClient(real_settings, plain).submit_many([make_job(id="first")]))  # the scripts are there
    client = Dying.from_url(real_settings.redis_url, decode_responses=True)
    with JobClient(real_settings, client) as producer:
        client.left = left
        jobs = [make_job(id=f"j{i}") for i in range(10)]
        told: list[Submitted | SaggarError] = []
        with pytest.raises(redis.ConnectionError, match="gone"):
            for outcome in producer.submit_many(jobs, chunk=4):
                told.append(outcome)
        assert len(told) == left // 4 * 4, "whole chunks: what is told was taken"
        client.left = 10**6
        again = list(producer.submit_many(jobs, chunk=4))
        created = [one.created for one in again if isinstance(one, Submitted)]
        assert created == [False] * left + [True] * (10 - left), "each job once, wherever it died"
        assert producer.counts()["queued"] == 11
