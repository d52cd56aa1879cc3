"""What a worker does with one job, on a real engine without a model, a fake Redis and a real folder."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fakeredis
import pytest
from saggar.engine.config import EngineConfig
from saggar.engine.engine import Engine
from saggar.engine.errors import WorkerDied
from saggar.jobs.cards import ModelCard, batch_key, check_job
from saggar.jobs.errors import JobFailed
from saggar.jobs.events import Events
from saggar.jobs.lanes import LaneStore
from saggar.jobs.ledger import Ledger, job_message
from saggar.jobs.record import UnreadText
from saggar.jobs.schema import Job
from saggar.jobs.settings import JobSettings
from saggar.storage.errors import StorageRefused
from saggar.storage.local import LocalStorage
from saggar.storage.results import read_result
from saggar.workers.attempts import Attempts
from saggar.workers.publish import Origin, Publisher
from saggar.workers.service import Dropped, GivenBack, Service
from saggar.workers.translate import to_card

from tests.support.cluster import noop_model, until
from tests.support.inputs import image, input_loader


@dataclass
class Bench:
    """A service and everything around it."""

    ledger: Ledger
    attempts: Attempts
    engine: Engine
    storage: LocalStorage
    card: ModelCard
    lost: threading.Event

    def __post_init__(self) -> None:
        publisher = Publisher(self.storage, None, Origin("noop", "r1", {"saggar": "0"}))
        inputs = input_loader(self.storage.url)
        self.service = Service(
            self.ledger, self.attempts, self.engine, publisher, self.card, "me", self.lost.set, inputs
        )

    def queue(self, **fields: object) -> Job:
        job = Job.model_validate({"model": "noop", "prompt": "p", "seed": 1, **fields})
        checked = check_job(job, self.card) if not job.allow_unserved else job
        self.ledger.submit(checked, job_message(checked, self.card), job.digest())
        return checked

    def state(self, job: Job) -> str:
        record = self.ledger.get(job.id)
        assert record is not None
        return record.state

    def run_aside(self, job: Job) -> tuple[threading.Thread, list[BaseException]]:
        """Runs the job in a thread; what it raises is in the list once the thread has ended."""
        raised: list[BaseException] = []

        def work() -> None:
            try:
                self.service.run(job.id, f"t-{job.id}")
            except (Dropped, GivenBack, JobFailed) as error:
                raised.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        return thread, raised


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    settings = JobSettings()
    ledger = Ledger(fakeredis.FakeRedis(decode_responses=True), settings)
    attempts = Attempts(ledger, pulse_s=0.02)
    with Engine.make(EngineConfig(model=str(noop_model(tmp_path / "noop")), executor="local")) as engine:
        storage = LocalStorage(tmp_path / "store")
        card = to_card(engine.info, "noop", 8)
        yield Bench(ledger, attempts, engine, storage, card, threading.Event())
    attempts.close()


def manifests(bench: Bench, job: Job) -> list[str]:
    return [info.key for info in bench.storage.list(f"{job.id}/") if info.key.endswith("result.json")]


def test_a_job_ends_with_objects_manifest_and_record(bench: Bench) -> None:
    job = bench.queue(num_outputs=2)
    result = bench.service.run(job.id, "t1")
    assert [output.seed for output in result.outputs] == [1, 2]
    record = bench.ledger.get(job.id)
    assert record is not None
    assert record.state == "succeeded"
    assert record.result == result
    assert manifests(bench, job) == [f"{job.id}/result.json"]
    assert bench.attempts.in_hand() == []


def test_texts_that_are_too_long_are_told_wherever_a_result_is(bench: Bench) -> None:
    job = bench.queue(prompt="one two three", negative_prompt="four five six seven", params={"reads": 2})
    result = bench.service.run(job.id, "t1")
    told = [
        {"field": "prompt", "read_tokens": 2, "tokens": 3},
        {"field": "negative_prompt", "read_tokens": 2, "tokens": 4},
    ]
    record = bench.ledger.get(job.id)
    assert record is not None and record.result == result
    assert result.unread is not None and [one.model_dump() for one in result.unread] == told
    manifest = read_result(bench.storage, f"{job.id}/result.json")
    assert json.loads(manifest.to_bytes())["unread"] == told
    assert manifest.outputs[0].sidecar is not None
    assert json.loads(bench.storage.get(manifest.outputs[0].sidecar.key))["unread"] == told
    *_, last = Events(bench.ledger.runner, JobSettings()).replay(job.id)
    assert (last.kind, last.data["unread"]) == ("succeeded", told)


def test_where_all_is_read_nothing_of_a_result_is_new_to_older_readers(bench: Bench) -> None:
    job = bench.queue(prompt="one two", params={"reads": 2})
    assert bench.service.run(job.id, "t1").unread is None
    assert "unread" not in json.loads(bench.storage.get(f"{job.id}/result.json"))
    kept = bench.ledger.runner.client.get(f"{JobSettings().key_prefix}result:{job.id}")
    assert json.loads(kept)["outputs"]
    assert "unread" not in json.loads(kept)


def test_a_message_that_comes_again_says_again_what_became_of_its_job(bench: Bench) -> None:
    job = bench.queue()
    first = bench.service.run(job.id, "t1")
    batches = bench.engine.stats()["batches"]
    assert bench.service.run(job.id, "t2") == first
    assert bench.engine.stats()["batches"] == batches
    failed = bench.queue(params={"fail_at": "step"})
    for token in ("t1", "t2"):
        with pytest.raises(JobFailed, match="asked to fail"):
            bench.service.run(failed.id, token)


@pytest.mark.parametrize("verb", ["encode", "predict", "step", "decode"])
def test_a_row_that_fails_fails_its_job_with_the_reason(bench: Bench, verb: str) -> None:
    job = bench.queue(params={"fail_at": verb, "fail_text": "because"})
    with pytest.raises(JobFailed, match="because"):
        bench.service.run(job.id, "t1")
    record = bench.ledger.get(job.id)
    assert record is not None
    assert record.error is not None
    assert (record.state, record.error.kind) == ("failed", "row_failed")


def test_a_format_that_cannot_hold_what_was_made_is_the_jobs_fault(bench: Bench) -> None:
    bench.storage.put("uploads/a.png", image("RGBA"), content_type="image/png")
    uri = bench.storage.uri("uploads/a.png")
    job = bench.queue(task="layers", inputs={"image": [uri]}, output={"format": "jpeg"})
    with pytest.raises(
        JobFailed, match=r"invalid: output\.format: jpeg has no transparency \(allowed: png, webp\)"
    ):
        bench.service.run(job.id, "t1")


def test_a_job_queued_without_a_card_is_checked_when_claimed(bench: Bench) -> None:
    job = bench.queue(allow_unserved=True, params={"steps": 0})
    with pytest.raises(JobFailed, match=r"params\.steps: 0 is too small"):
        bench.service.run(job.id, "t1")
    assert bench.state(job) == "failed"


def test_a_job_queued_without_a_card_goes_to_its_own_kind_first(bench: Bench) -> None:
    job = Job(model="noop", prompt="p", seed=1, allow_unserved=True, params={"key": "own"})
    message = job_message(job, None)
    bench.ledger.submit(job, message, job.digest())
    with pytest.raises(Dropped):
        bench.service.run(job.id, "t1", key=message.batch_key)
    assert bench.state(job) == "queued"
    key = batch_key(check_job(job, bench.card), bench.card)
    assert bench.service.run(job.id, "t2", put=2, key=key).attempt == 2


def test_a_job_queued_without_a_card_and_without_batch_fields_is_placed_once(bench: Bench) -> None:
    """Its new message waits under the key of the completed job, which is what the next worker compares with."""
    job = Job(model="noop", prompt="p", seed=1, allow_unserved=True)
    message = job_message(job, None)
    bench.ledger.submit(job, message, job.digest())
    with pytest.raises(Dropped):
        bench.service.run(job.id, "t1", key=message.batch_key)
    lane = LaneStore(bench.ledger.runner.client, JobSettings().key_prefix)
    batches = [lane.fetch("gen.noop", "w", rows=1, seats=1) for _ in range(2)]
    keys = [batch.key for batch in batches if batch is not None]
    assert sorted(keys) == sorted([message.batch_key, batch_key(check_job(job, bench.card), bench.card)])
    with pytest.raises(Dropped, match="stale"):  # the first message once more
        bench.service.run(job.id, "t2", key=message.batch_key)
    placed = next(key for key in keys if key != message.batch_key)
    assert bench.service.run(job.id, "t3", put=2, key=placed).attempt == 2


def test_a_job_that_cannot_be_read_fails_in_whoever_is_linked_to_it(bench: Bench) -> None:
    job = bench.queue()
    bench.ledger.runner.client.set(f"saggar:spec:{job.id}", '{"version": 2}')
    with pytest.raises(JobFailed, match="unreadable: version"):
        bench.service.run(job.id, "t1")


def test_an_attempt_that_was_overtaken_is_not_seen(bench: Bench) -> None:
    job = bench.queue(params={"sleep_s": 0.05, "steps": 8})
    thread, raised = bench.run_aside(job)
    until(bench.attempts.in_hand)
    other = bench.ledger.start(job.id, "somebody else", "t2")
    thread.join(20)
    assert isinstance(raised[0], Dropped)
    record = bench.ledger.get(job.id)
    assert record is not None
    assert (record.state, record.owner) == ("running", "somebody else")
    assert getattr(other, "attempt", None) == record.attempt == 2


def test_a_manifest_without_a_record_is_taken_over_and_not_made_again(bench: Bench) -> None:
    """A crash between result.json and the ledger's commit."""
    job = bench.queue(prompt="one two three", params={"reads": 2})
    bench.ledger.start(job.id, "crashed", "t0")
    publisher = Publisher(bench.storage, None, Origin("noop", "r1", {}))
    from saggar.workers.translate import to_request

    output = bench.engine.submit(to_request(job)).result(20)
    written = publisher.commit(publisher.upload(job, 1, output, lambda: True))
    batches = bench.engine.stats()["batches"]
    found = bench.service.run(job.id, "t1")
    assert found.outputs == written.outputs
    assert found.unread == written.unread == (UnreadText(field="prompt", read_tokens=2, tokens=3),)
    assert bench.engine.stats()["batches"] == batches
    assert bench.state(job) == "succeeded"


def test_a_cancel_ends_a_running_job_before_its_next_step(bench: Bench) -> None:
    job = bench.queue(params={"sleep_s": 0.05, "steps": 1000})
    thread, raised = bench.run_aside(job)
    until(lambda: bench.state(job) == "running")
    assert bench.ledger.cancel(job.id).outcome == "requested"
    thread.join(20)
    assert isinstance(raised[0], Dropped)
    assert bench.state(job) == "cancelled"
    assert manifests(bench, job) == []


def test_a_drain_gives_back_what_waits_and_lets_the_rest_finish(bench: Bench) -> None:
    running = bench.queue(params={"sleep_s": 0.05, "steps": 20, "key": "a"})
    first, none_raised = bench.run_aside(running)
    until(lambda: any(one.phase == "executing" for one in bench.attempts.in_hand()))
    waiting = bench.queue(params={"key": "b"})
    second, raised = bench.run_aside(waiting)
    until(lambda: sum(one.handle is not None for one in bench.attempts.in_hand()) == 2)
    bench.attempts.drain()
    first.join(20)
    second.join(20)
    assert none_raised == []
    assert bench.state(running) == "succeeded"
    assert isinstance(raised[0], GivenBack)
    assert bench.state(waiting) == "queued"


def test_without_conditional_put_the_ledger_decides_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStorage, "conditional_put", property(lambda _self: False))
    job = bench.queue()
    order: list[str] = []
    commit, put = bench.ledger.commit, bench.storage.put
    monkeypatch.setattr(bench.ledger, "commit", lambda *args: order.append("ledger") or commit(*args))
    monkeypatch.setattr(
        bench.storage,
        "put",
        lambda key, *args, **more: order.append(key.rpartition("/")[2]) or put(key, *args, **more),
    )
    bench.service.run(job.id, "t1")
    assert order[-2:] == ["ledger", "result.json"]
    assert bench.state(job) == "succeeded"


def test_a_store_that_refuses_a_jobs_objects_fails_the_job(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = bench.storage.put

    def refuse(key: str, *args: object, **more: object) -> object:
        if "_probe/" in key:
            return put(key, *args, **more)
        raise StorageRefused("not into this folder", code="AccessDenied", status=403)

    monkeypatch.setattr(bench.storage, "put", refuse)
    job = bench.queue()
    with pytest.raises(JobFailed, match="storage: not into this folder"):
        bench.service.run(job.id, "t1")


def test_a_store_that_refuses_everybody_is_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    put, refused = bench.storage.put, []

    def refuse(key: str, *args: object, **more: object) -> object:
        refused.append(key)
        if len(refused) > 4:
            return put(key, *args, **more)
        raise StorageRefused("no such bucket", code="NoSuchBucket", status=404)

    monkeypatch.setattr(bench.storage, "put", refuse)
    job = bench.queue()
    bench.service.run(job.id, "t1")
    assert bench.state(job) == "succeeded"


def test_an_engine_that_died_gives_the_job_back_and_ends_the_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object, **__: object) -> None:
        raise WorkerDied("rank 0 ended")

    monkeypatch.setattr(bench.engine, "submit", die)
    job = bench.queue()
    with pytest.raises(GivenBack):
        bench.service.run(job.id, "t1")
    assert bench.lost.is_set()
    assert bench.state(job) == "queued"
