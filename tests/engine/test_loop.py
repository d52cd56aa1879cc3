"""The loop with the no-op family in this process: states, order, aborts, deadlines, events, counts."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from saggar.engine import Cancelled, DeadlineExceeded, EngineEvent, InvalidRequest, LoadError, RowFailed
from saggar.engine.handle import STREAM_EVENTS, Stream
from saggar.engine.live import Deadlines, Live
from saggar.engine.request import BULK, INTERACTIVE, NORMAL, Request
from saggar.engine.sched.base import Decision, Entry
from saggar.engine.sched.policy import KeyedScheduler, Rules

from tests.engine.conftest import MakeEngine
from tests.engine.support import Recorder, at_step, check_noop, eventually, noop, settled


def test_waiting_running_completed_nothing_left_pending(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(mode=mode)
    engine.pause()
    handle = engine.submit(noop("a"))
    assert engine.stats()["waiting"] == 1
    engine.resume()
    check_noop(noop("a"), handle.result(10))
    stats = settled(engine)
    assert stats["ended.completed"] == 1
    assert [event.kind for event in handle.events()] == ["started", *["step"] * 4, "output"]


@pytest.mark.parametrize("verb", ["encode", "predict", "step", "decode"])
def test_an_errors_text_survives_and_neighbours_go_on(make_engine: MakeEngine, mode: str, verb: str) -> None:
    engine = make_engine(mode=mode)
    recorder = Recorder()
    requests = [noop(f"r{i}", steps=3) for i in range(5)]
    requests[2] = noop("r2", steps=3, fail_at=verb, fail_text="the glaze ran")
    engine.pause()
    handles = [engine.submit(request, on_event=recorder) for request in requests]
    engine.resume()
    with pytest.raises(RowFailed, match="ValueError: the glaze ran"):
        handles[2].result(10)
    assert [event.error for event in recorder.events if event.kind == "error"] == [
        "ValueError: the glaze ran"
    ]
    for index in (0, 1, 3, 4):
        check_noop(requests[index], handles[index].result(10))
    assert settled(engine)["ended.error"] == 1


def test_capacity_one_keeps_arrival_order(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(mode=mode, max_batch=1)
    recorder = Recorder()
    engine.pause()
    handles = [engine.submit(noop(f"r{i}", key=str(i % 3)), on_event=recorder) for i in range(12)]
    engine.resume()
    for handle in handles:
        handle.result(10)
    assert [event.request_id for event in recorder.events if event.kind == "started"] == [
        f"r{i}" for i in range(12)
    ]


def test_batches_fill_to_capacity_and_no_further(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch=8)
    outputs = engine.generate([noop(f"r{i}") for i in range(20)])
    assert [output.batch_size for output in outputs] == [8] * 16 + [4] * 4
    assert len({output.batch_id for output in outputs}) == 3


def test_abort_of_a_waiting_request_never_executes_it(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(mode=mode)
    recorder = Recorder()
    engine.pause()
    handle = engine.submit(noop("a"), on_event=recorder)
    assert handle.cancel()
    with pytest.raises(Cancelled):
        handle.result(0)
    engine.resume()
    engine.submit(noop("b")).result(10)
    assert recorder.kinds("a") == ["error"]
    assert settled(engine)["rows.cond"] == 4
    assert not handle.cancel()
    assert not engine.cancel("unknown")


def test_abort_of_a_running_request_ends_it_before_its_next_step(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(mode=mode)
    recorder = Recorder(at_step("a", 3, lambda: engine.cancel("a")))
    engine.pause()
    victim = engine.submit(noop("a", steps=50), on_event=recorder)
    neighbour = engine.submit(noop("b", steps=9), on_event=recorder)
    engine.resume()
    with pytest.raises(Cancelled):
        victim.result(10)
    check_noop(noop("b"), neighbour.result(10))
    assert recorder.steps("a") == [1, 2, 3]
    assert recorder.kinds("a").count("error") == 1
    stats = settled(engine)
    assert stats["rows.cond"] == 3 + 9
    assert stats["ended.aborted"] == 1


def test_a_failing_warm_up_fails_the_start(make_engine: MakeEngine, tmp_path: Any) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "NoopPipeline"}')
    (tmp_path / "saggar.json").write_text('{"params": {"fail_at": {"default": "predict"}}}')
    with pytest.raises(LoadError, match="the warm-up failed: ValueError: asked to fail"):
        make_engine(model=str(tmp_path))
    assert make_engine(model=str(tmp_path), warmup=()).health().ok


def test_an_injected_scheduler_is_used(make_engine: MakeEngine) -> None:
    decisions: list[Decision] = []

    class Recording(KeyedScheduler):
        def schedule(self, now: float, replica: int = 0) -> Decision:
            decisions.append(super().schedule(now, replica))
            return decisions[-1]

    from saggar.engine.sched.capacity import Capacity

    scheduler = Recording(Rules(Capacity(max_rows=2)))
    engine = make_engine(scheduler=scheduler)
    assert [output.batch_size for output in engine.generate([noop("a"), noop("b"), noop("c")])] == [2, 2, 1]
    assert any(decision.run for decision in decisions)


def test_unlike_step_counts_share_a_batch(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(mode=mode)
    requests = [noop(f"r{i}", steps=steps) for i, steps in enumerate((5, 1, 9, 3))]
    outputs = engine.generate(requests)
    assert {output.batch_id for output in outputs} == {outputs[0].batch_id}
    assert [output.steps for output in outputs] == [5, 1, 9, 3]
    assert settled(engine)["rows.cond"] == 5 + 1 + 9 + 3


def test_unlike_keys_never_share_a_batch(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(mode=mode)
    requests = [noop(f"r{i}", key=str(i % 4)) for i in range(40)]
    outputs = engine.generate(requests)
    keys: dict[str, set[str]] = {}
    for request, output in zip(requests, outputs, strict=True):
        keys.setdefault(output.batch_id, set()).add(engine.batch_key(request))
    assert all(len(found) == 1 for found in keys.values())


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "4", None, float("nan"), 10**9])
def test_bad_step_counts_are_refused(make_engine: MakeEngine, steps: Any) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(noop("a", steps=steps))
    assert caught.value.field == "params.steps"
    assert caught.value.allowed == "integer, 1 to 100000"
    assert engine.stats()["waiting"] == 0


def test_a_deadline_ends_a_request_in_each_phase(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(mode=mode)
    engine.pause()
    waiting = engine.submit(noop("waiting", deadline_s=0.02))
    with pytest.raises(DeadlineExceeded):
        waiting.result(10)
    engine.resume()
    recorder = Recorder()
    running = engine.submit(noop("running", steps=100_000, sleep_s=0.001, deadline_s=0.1), on_event=recorder)
    with pytest.raises(DeadlineExceeded):
        running.result(20)
    assert recorder.kinds("running").count("error") == 1
    assert len(recorder.steps("running")) > 0
    decoding = engine.submit(noop("last step", steps=1, sleep_s=0.2, deadline_s=0.05))
    with pytest.raises(DeadlineExceeded):
        decoding.result(10)
    assert settled(engine)["ended.aborted"] == 3


def test_a_dropped_stream_frees_its_buffer(make_engine: MakeEngine) -> None:
    engine = make_engine()
    gate = threading.Event()
    handle = engine.submit(noop("a", steps=20), on_event=at_step("a", 5, lambda: gate.wait(10)))
    stream = weakref.ref(handle._stream)
    assert stream() is not None
    del handle
    gc.collect()
    assert stream() is None
    gate.set()
    assert settled(engine)["ended.completed"] == 1


def test_a_slow_reader_loses_steps_but_neither_start_nor_end() -> None:
    stream = Stream()
    stream.put(EngineEvent("started", "a"))
    for step in range(10 * STREAM_EVENTS):
        stream.put(EngineEvent("step", "a", step + 1))
    stream.put(EngineEvent("output", "a"))
    assert len(stream) <= STREAM_EVENTS
    events = list(stream)
    assert (events[0].kind, events[-1].kind) == ("started", "output")
    assert events[-2].step == 10 * STREAM_EVENTS


@pytest.mark.parametrize("same_key", [True, False])
def test_priorities_overtake_at_the_next_border(make_engine: MakeEngine, same_key: bool) -> None:
    engine = make_engine(mode="step_batch", max_batch=2)
    key = "bulk" if same_key else "urgent"
    urgent = noop("urgent", steps=3, key=key, priority=INTERACTIVE, num_outputs=2)

    def submit_urgent() -> None:
        engine.submit(urgent, on_event=recorder)

    recorder = Recorder(at_step("bulk", 4, submit_urgent))
    bulk = engine.submit(noop("bulk", steps=10, key="bulk", priority=BULK), on_event=recorder)
    check_noop(noop("bulk"), bulk.result(10))
    order = [(event.request_id, event.step) for event in recorder.events if event.kind == "step"]
    assert order == [("bulk", s) for s in (1, 2, 3, 4)] + [("urgent", s) for s in (1, 2, 3)] + [
        ("bulk", s) for s in (5, 6, 7, 8, 9, 10)
    ]
    assert engine.stats()["preempted"] == 1


def test_a_join_needs_no_preemption_where_there_is_room(make_engine: MakeEngine) -> None:
    engine = make_engine(mode="step_batch", max_batch=2)
    recorder = Recorder(
        at_step("a", 2, lambda: engine.submit(noop("b", steps=2, priority=NORMAL), on_event=recorder))
    )
    engine.submit(noop("a", steps=6), on_event=recorder).result(10)
    order = [(event.request_id, event.step) for event in recorder.events if event.kind == "step"]
    assert order[:6] == [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("a", 4), ("b", 2)]
    assert "preempted" not in engine.stats()


def test_request_batch_admits_nobody_to_a_running_batch(make_engine: MakeEngine) -> None:
    engine = make_engine(mode="request_batch", max_batch=2)
    late = noop("b", steps=2, priority=INTERACTIVE)
    recorder = Recorder(at_step("a", 2, lambda: engine.submit(late, on_event=recorder)))
    engine.submit(noop("a", steps=4), on_event=recorder).result(10)
    settled(engine)
    order = [event.request_id for event in recorder.events if event.kind == "step"]
    assert order == ["a"] * 4 + ["b"] * 2


def test_progress_counts_match_steps(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(mode=mode)
    recorder = Recorder()
    engine.pause()
    handles = [engine.submit(noop(f"r{i}", steps=i + 1), on_event=recorder) for i in range(6)]
    engine.resume()
    for handle in handles:
        handle.result(10)
    for i in range(6):
        assert recorder.steps(f"r{i}") == list(range(1, i + 2))
        assert {event.steps for event in recorder.events if event.request_id == f"r{i}" and event.step} == {
            i + 1
        }
        assert recorder.kinds(f"r{i}")[0] == "started"
        assert recorder.kinds(f"r{i}")[-1] == "output"


def test_cost_capacity_splits_large_from_small(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(mode=mode, max_batch=8, max_cost=64)
    plain = [noop(f"plain{i}") for i in range(4)]
    guided = [noop(f"guided{i}", guidance_scale=3.0) for i in range(4)]
    outputs = engine.generate(plain + guided)
    assert max(output.batch_size for output in outputs) == 4
    for request, output in zip(plain + guided, outputs, strict=True):
        check_noop(request, output)
    assert any(reason in engine.stats() for reason in ("cut.cost",))


def test_stats_and_reasons_add_up(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch=4)
    rows = [noop(f"r{i}", key=str(i % 5), num_outputs=1 + i % 3) for i in range(50)]
    outputs = engine.generate(rows)
    stats = settled(engine)
    assert stats["batches"] == len({output.batch_id for output in outputs})
    assert sum(count for name, count in stats.items() if name.startswith("cut.")) == stats["batches"]
    assert stats["rows"] == sum(request.num_outputs for request in rows)
    assert stats["ended.completed"] == 50
    sizes = Counter(output.batch_id for output in outputs)
    assert sum(sizes.values()) == 50


def test_each_of_2000_random_requests_ends_exactly_once_in_the_right_state(
    make_engine: MakeEngine, mode: str
) -> None:
    engine = make_engine(mode=mode, max_batch=8)
    rng = random.Random(17)
    recorder = Recorder()
    requests = [_random_request(rng, index) for index in range(2000)]

    def submit_and_disturb(some: list[Request]) -> list[Any]:
        own, handles = random.Random(some[0].id), []
        for request in some:
            handles.append(engine.submit(request, on_event=recorder))
            if own.random() < 0.2:
                own.choice(handles).cancel()
        return handles

    with ThreadPoolExecutor(4) as pool:
        handles = [
            handle
            for part in pool.map(submit_and_disturb, [requests[i::4] for i in range(4)])
            for handle in part
        ]
    ends: Counter[str] = Counter()
    by_id = {request.id: request for request in requests}
    for handle in handles:
        error = handle.wait()
        ends[type(error).__name__] += 1
        if error is None:
            check_noop(by_id[handle.id], handle.result())
        elif isinstance(error, RowFailed):
            assert by_id[handle.id].params["fail_at"]
        else:
            assert isinstance(error, Cancelled | DeadlineExceeded)
    stats = settled(engine)
    last = Counter(event.request_id for event in recorder.events if event.kind in ("output", "error"))
    assert len(last) == 2000
    assert set(last.values()) == {1}
    assert stats["ended.completed"] == ends["NoneType"] > 300
    assert stats["ended.error"] == ends["RowFailed"] > 0
    assert stats["ended.aborted"] == ends["Cancelled"] + ends["DeadlineExceeded"] > 0
    assert len(engine._loops[0].executor._runner) == 0  # type: ignore[attr-defined]


def _random_request(rng: random.Random, index: int) -> Request:
    return noop(
        f"r{index}",
        key=str(rng.randrange(5)),
        steps=rng.randint(1, 5),
        num_outputs=rng.choice([1, 1, 1, 2, 3]),
        fail_at=rng.choice(["", "", "", "", "", "", "", "encode", "predict", "step", "decode"]),
        priority=rng.choice([INTERACTIVE, NORMAL, BULK]),
        deadline_s=rng.choice([None, None, None, 0.0, 0.05, 30.0]),
    )


def test_what_is_finished_does_not_wait_for_the_others_to_be_decoded(
    make_engine: MakeEngine, mode: str
) -> None:
    engine = make_engine(mode=mode, decode_rows=1)
    recorder = Recorder()
    engine.pause()
    handles = [engine.submit(noop(f"r{i}", steps=1 if i else 30), on_event=recorder) for i in range(4)]
    engine.resume()
    for handle in handles:
        handle.result(10)
    ends = {
        event.request_id: [other.step for other in recorder.events[:index] if other.request_id == "r0"][-1]
        for index, event in enumerate(recorder.events)
        if event.kind == "output"
    }
    assert ends == {"r1": 1, "r2": 2, "r3": 3, "r0": 30}


def test_a_parked_request_that_is_cancelled_frees_its_latents_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(mode="step_batch", max_batch=1)
    parked = threading.Event()

    def watch(event: EngineEvent) -> None:
        if event.request_id == "bulk" and event.step == 2:
            engine.submit(noop("urgent", steps=10_000, sleep_s=0.001, priority=INTERACTIVE), on_event=watch)
        elif event.request_id == "urgent" and event.step == 2:
            parked.set()

    bulk = engine.submit(noop("bulk", steps=10), on_event=watch)
    assert parked.wait(10)
    assert bulk.cancel()
    assert isinstance(bulk.wait(), Cancelled)
    eventually(lambda: len(engine._loops[0].executor._runner) == 1)  # type: ignore[attr-defined]
    assert engine.cancel("urgent")
    settled(engine)


def test_deadlines_of_what_has_ended_are_forgotten() -> None:
    deadlines = Deadlines()
    entries = [Entry(Request(f"r{i}", ""), "k", i, 0.0, deadline=100.0 - i / 1000) for i in range(1000)]
    for entry in entries:
        deadlines.add(entry)
    lives = {entry.id: Live(entry, Stream(), None) for entry in entries[:3]}
    assert deadlines.due(50.0, lives) == []
    assert len(deadlines._heap) == 3
    lives["r1"] = Live(Entry(Request("r1", ""), "k", 2000, 0.0), Stream(), None)
    assert [live.entry.id for live in deadlines.due(100.0, lives)] == ["r2", "r0"]
    assert deadlines.next() is None
