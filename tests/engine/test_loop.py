"""The loop with the no-op family in this process: states, order, aborts, deadlines, events, counts."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest
from saggar.engine import (
    Cancelled,
    DeadlineExceeded,
    Engine,
    EngineClosed,
    EngineError,
    EngineEvent,
    InvalidRequest,
    LoadError,
    OutOfMemory,
    RowFailed,
)
from saggar.engine.config import WarmUp
from saggar.engine.handle import STREAM_EVENTS, Stream
from saggar.engine.live import Deadlines, Live
from saggar.engine.models import registry
from saggar.engine.models.noop import Noop, colour
from saggar.engine.models.registry import serves
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


@serves("ShoutPipeline")
class Shout(Noop):
    """Its pre-processing writes the prompt in capitals; its decode loses or adds pictures on demand."""

    name = "shout"

    def preprocess(self, request: Request) -> Request:
        return Request(**{**vars(request), "prompt": request.prompt.upper()})

    def post_decode(self, states: Any) -> list[list[np.ndarray]]:
        pictures = super().post_decode(states)
        for state, own in zip(states, pictures, strict=True):
            if state.request.prompt == "FEWER":
                own.pop()
            elif state.request.prompt == "MORE":
                own.append(own[0])
        return pictures


@pytest.fixture
def shout(tmp_path: Any) -> str:
    (tmp_path / "model_index.json").write_text('{"_class_name": "ShoutPipeline"}')
    return str(tmp_path)


def test_edits_by_pre_processing_reach_the_worker(make_engine: MakeEngine, shout: str) -> None:
    output = make_engine(model=shout).submit(noop("a", prompt="loud")).result(10)
    assert (output.images[0] == colour("LOUD", 7).astype(np.uint8)).all()


@pytest.mark.parametrize(("prompt", "count"), [("fewer", 1), ("more", 3)])
def test_fewer_or_more_outputs_than_asked_fail_loudly(
    make_engine: MakeEngine, shout: str, prompt: str, count: int
) -> None:
    engine = make_engine(model=shout)
    engine.pause()
    bad = engine.submit(noop("a", prompt=prompt, num_outputs=2))
    good = engine.submit(noop("b", num_outputs=2))
    engine.resume()
    with pytest.raises(RowFailed, match=f"2 outputs were asked for and {count} came"):
        bad.result(10)
    assert len(good.result(10).images) == 2


def test_results_go_to_their_own_request_in_any_batch_order(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(mode=mode)
    random.seed(4)
    requests = [
        noop(
            f"r{i}",
            key=str(random.randrange(3)),
            steps=random.randint(1, 6),
            num_outputs=random.randint(1, 4),
        )
        for i in range(60)
    ]
    for request, output in zip(requests, engine.generate(requests), strict=True):
        check_noop(request, output)


def test_more_outputs_than_rows_run_alone_in_forwards_of_the_limit(
    make_engine: MakeEngine, mode: str
) -> None:
    engine = make_engine(mode=mode, max_batch=4)
    requests = [noop("small"), noop("large", num_outputs=10, steps=2)]
    outputs = engine.generate(requests)
    for request, output in zip(requests, outputs, strict=True):
        check_noop(request, output)
    assert outputs[1].batch_size == 10
    assert settled(engine)["forwards.cond"] == 4 + 2 * 3
    assert engine.stats()["cut.alone"] == 1


def test_out_of_memory_halves_the_forward_and_is_learned(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(mode=mode, max_batch=8)
    requests = [noop(f"r{i}", steps=5, memory_rows=4) for i in range(8)]
    for request, output in zip(requests, engine.generate(requests), strict=True):
        check_noop(request, output)
        assert output.batch_size == 8
    stats = engine.stats()
    assert stats["memory.halved"] == 1
    assert stats["forwards.cond"] == 5 * 2
    engine.generate([noop(f"again{i}", steps=5, memory_rows=4) for i in range(8)])
    assert engine.stats()["memory.halved"] == 1
    engine.generate([noop(f"other{i}", steps=5, key="another shape") for i in range(8)])
    assert engine.stats()["forwards.cond"] == 5 * 2 + 5 * 2 + 5


def test_what_a_failed_call_held_is_free_before_its_halves_are_tried(make_engine: MakeEngine) -> None:
    held: list[weakref.ref[np.ndarray]] = []
    seen: list[tuple[int, bool]] = []

    class Hungry(Noop):
        def post_decode(self, states: Any) -> Any:
            seen.append((len(states), any(ref() is not None for ref in held)))
            activations = np.zeros(1000)
            held.append(weakref.ref(activations))
            if len(states) > 1:
                raise MemoryError("decoding")
            return super().post_decode(states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._FAMILIES, "NoopPipeline", Hungry)
        engine = make_engine(warmup=())
    freed: list[int] = []
    engine._loops[0].executor._runner.free_memory = lambda: freed.append(len(seen))  # type: ignore[attr-defined]
    engine.generate([noop(f"r{i}", steps=1) for i in range(4)])
    assert seen == [(4, False), (2, False), (1, False), (1, False), (2, False), (1, False), (1, False)]
    assert freed == [1, 2, 5]


def test_only_a_single_row_that_does_not_fit_ends_out_of_memory(make_engine: MakeEngine) -> None:
    class Small(Noop):
        def predict(self, rows: Any, branch: str) -> np.ndarray:
            if any(row.state.request.id == "huge" for row in rows):
                raise RuntimeError("CUDA: Out of memory, tried to allocate 3 TiB")
            return super().predict(rows, branch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._FAMILIES, "NoopPipeline", Small)
        engine = make_engine()
    engine.pause()
    handles = [engine.submit(noop(name)) for name in ("a", "huge", "b")]
    engine.resume()
    assert [type(handle.wait()) for handle in handles] == [type(None), OutOfMemory, type(None)]


def test_one_poisonous_row_among_eight_leaves_seven_pictures(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(mode=mode)
    requests = [noop(f"r{i}", fail_at="predict" if i == 5 else "") for i in range(8)]
    engine.pause()
    handles = [engine.submit(request) for request in requests]
    engine.resume()
    assert [handle.wait() is None for handle in handles] == [i != 5 for i in range(8)]
    assert settled(engine)["ended.completed"] == 7


def test_latents_that_are_not_finite_end_their_row_and_name_the_step(
    make_engine: MakeEngine, mode: str
) -> None:
    engine = make_engine(mode=mode)
    engine.pause()
    bad, good = engine.submit(noop("bad", steps=7, nan_at=3)), engine.submit(noop("good", steps=7))
    engine.resume()
    with pytest.raises(RowFailed, match="the latents are not finite after step 3 of 7"):
        bad.result(10)
    check_noop(noop("good"), good.result(10))


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


def test_a_row_without_guidance_runs_no_unconditional_forward(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(mode=mode)
    engine.generate([noop("a", steps=5), noop("b", steps=3, guidance_scale=1.0)])
    assert "forwards.uncond" not in engine.stats()
    engine.generate([noop("a", steps=5), noop("b", steps=3, guidance_scale=2.0, num_outputs=2)])
    stats = engine.stats()
    assert (stats["forwards.uncond"], stats["rows.uncond"]) == (3, 6)


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


def test_close_ends_what_has_not_ended(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(mode=mode)
    started = threading.Event()
    running = engine.submit(noop("a", steps=100_000, sleep_s=0.01), on_event=at_step("a", 1, started.set))
    waiting = engine.submit(noop("b", key="other"))
    assert started.wait(10)
    engine.close()
    for handle in (running, waiting):
        with pytest.raises(EngineClosed):
            handle.result(0)
    with pytest.raises(EngineClosed):
        engine.submit(noop("c"))
    assert engine.room().seats == 0
    engine.close()
    assert not [
        thread for thread in threading.enumerate() if thread.name == "saggar-engine" and thread.is_alive()
    ]


@pytest.mark.parametrize("where", ["a step", "the end"])
def test_close_from_a_callback_ends_the_engine(make_engine: MakeEngine, executor: str, where: str) -> None:
    engine = make_engine(executor=executor, mode="step_batch", max_batch=1)
    raised: list[RuntimeError | None] = []

    def close(*_: object) -> None:
        try:
            engine.close()
        except RuntimeError as error:
            raised.append(error)
        else:
            raised.append(None)

    engine.pause()
    first = engine.submit(noop("a", steps=3), on_event=at_step("a", 1, close) if where == "a step" else None)
    if where == "the end":
        first.add_done_callback(close)
    other = engine.submit(noop("b", steps=100_000))
    pids = [pid for pid in engine.health().pids if executor == "multiproc"]
    engine.resume()
    assert isinstance(other.wait(), EngineClosed)
    assert (first.wait() is None) == (where == "the end")
    engine._loops[0].thread.join(10)
    assert not engine._loops[0].thread.is_alive()
    assert raised == [None]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    engine.close()


def test_generate_raises_the_first_error_after_all_have_ended(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(RowFailed, match="second"):
        engine.generate([noop("a"), noop("b", fail_at="step", fail_text="second"), noop("c", steps=30)])
    assert settled(engine)["ended.completed"] == 2
    assert engine.generate([]) == []


def test_an_id_is_used_once_at_a_time(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.pause()
    engine.submit(noop("a"))
    with pytest.raises(InvalidRequest, match="already in the engine"):
        engine.submit(noop("a"))
    with pytest.raises(InvalidRequest, match="already in the engine"):
        engine.generate([noop("b"), noop("b")])
    engine.resume()
    settled(engine)
    engine.submit(noop("a")).result(10)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("id", {"id": ""}),
        ("task", {"task": "t2v"}),
        ("prompt", {"prompt": None}),
        ("prompt", {"prompt": "x" * 100_000}),
        ("negative_prompt", {"negative_prompt": 5}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": 2**63}),
        ("seed", {"seed": 2**63 - 1, "num_outputs": 2}),
        ("seed", {"seed": 1.0}),
        ("num_outputs", {"num_outputs": 0}),
        ("num_outputs", {"num_outputs": 1000}),
        ("priority", {"priority": 3}),
        ("deadline_s", {"deadline_s": -1.0}),
        ("deadline_s", {"deadline_s": "soon"}),
        ("prompt", {"prompt": "a\ud800b"}),
        ("negative_prompt", {"negative_prompt": "a\ud800b"}),
        ("deadline_s", {"deadline_s": float("nan")}),
        ("preview_every", {"preview_every": -1}),
        ("inputs.image", {"inputs": {"image": [np.zeros((2, 2, 3))]}}),
        ("params.colour", {"colour": "red"}),
        ("params.height", {"height": 0}),
        ("params.sleep_s", {"sleep_s": float("inf")}),
        ("params.fail_at", {"fail_at": "nowhere"}),
        ("params.key", {"key": None}),
    ],
)
def test_bad_requests_are_refused_by_field(
    make_engine: MakeEngine, field: str, change: dict[str, Any]
) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(noop(**{"name": "a", **change}) if "id" not in change else noop("a", **change))
    assert caught.value.field == field
    assert field in str(caught.value)


def test_callbacks_may_call_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine()
    chain: list[str] = []
    over = threading.Event()

    def again(handle: Any) -> None:
        chain.append(handle.id)
        if len(chain) < 20:
            engine.submit(noop(f"r{len(chain)}")).add_done_callback(again)
        else:
            over.set()

    engine.submit(noop("r0")).add_done_callback(again)
    assert over.wait(20)
    assert chain == [f"r{i}" for i in range(20)]


def test_a_broken_scheduler_ends_every_request(make_engine: MakeEngine) -> None:
    class Broken(KeyedScheduler):
        def schedule(self, now: float, replica: int = 0) -> Decision:
            if self.counts()["waiting"]:
                raise RuntimeError("no idea what to do")
            return super().schedule(now, replica)

    from saggar.engine.sched.capacity import Capacity

    engine = make_engine(scheduler=Broken(Rules(Capacity(1))))
    silent, threading.excepthook = threading.excepthook, lambda _: None
    try:
        with pytest.raises(EngineError, match="no idea what to do"):
            engine.submit(noop("a")).result(10)
        eventually(lambda: not engine.health().ok)
    finally:
        threading.excepthook = silent


def test_seats_follow_reservations_and_batches(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch=4, reservation_hold_s=30)
    key = engine.batch_key(noop("x", key="k"))
    assert (engine.room().seats, engine.room().open_key) == (4, None)
    first = engine.reserve(key, 3)
    assert (engine.room().seats, engine.room().open_key, engine.room().room) == (1, key, 1)
    handles = [engine.submit(noop(f"r{i}", key="k"), reservation=first) for i in range(2)]
    assert (first.rows, engine.room().seats) == (1, 1)
    last = engine.submit(noop("r2", key="k", num_outputs=1), reservation=first)
    outputs = [handle.result(10) for handle in [*handles, last]]
    assert {output.batch_size for output in outputs} == {3}
    first.release()
    assert engine.room().seats == 4


def test_a_batch_is_held_for_announced_rows_but_not_for_ever(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch=4, reservation_hold_s=0.1)
    reservation = engine.reserve(engine.batch_key(noop("x")), 2)
    output = engine.submit(noop("a"), reservation=reservation).result(10)
    assert output.batch_size == 1
    assert engine.stats()["cut.late"] == 1
    grown = threading.Event()
    engine.on_room(grown.set)
    reservation.release()
    reservation.release()
    assert grown.wait(10)
    assert engine.room().seats == 4


def test_an_early_release_lets_the_batch_go_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch=4, reservation_hold_s=3600)
    reservation = engine.reserve(engine.batch_key(noop("x")), 2)
    handle = engine.submit(noop("a"), reservation=reservation)
    reservation.release()
    assert handle.result(10).batch_size == 1


def test_whoever_fetches_is_told_when_a_batch_begins_and_room_grows(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch=2)
    told: list[int] = []
    at_work, go_on = threading.Event(), threading.Event()

    def stay() -> None:
        at_work.set()
        go_on.wait(10)

    first = at_step("r0", 1, stay)
    engine.pause()
    handles = [engine.submit(noop(f"r{i}"), on_event=first) for i in range(2)]
    assert engine.room().seats == 0
    engine.on_room(lambda: told.append(engine.room().seats))
    engine.resume()
    assert at_work.wait(10)
    assert told == [2]
    later = engine.submit(noop("r2"))
    assert engine.room().seats == 1
    go_on.set()
    for handle in [*handles, later]:
        handle.result(10)
    eventually(lambda: told[-1] == 2)


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


def test_pause_takes_no_step_and_offers_no_seat(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(mode=mode)
    recorder = Recorder(at_step("a", 1, engine.pause))
    handle = engine.submit(noop("a", steps=3), on_event=recorder)
    if mode == "step_batch":
        eventually(lambda: recorder.steps("a") == [1])
        assert engine.room().seats == 0
        assert not handle.done()
    engine.resume()
    check_noop(noop("a"), handle.result(10))


def test_streaming_yields_chunks_only_at_borders_and_always_a_last_output(make_engine: MakeEngine) -> None:
    engine = make_engine("noop-stream", mode="request_batch")
    assert engine.config.mode == "step_batch"
    requests = [
        noop("none", steps=5),
        noop("two", steps=7, chunk_every=3, num_outputs=2),
        noop("end", steps=4, chunk_every=4),
    ]
    engine.pause()
    handles = [engine.submit(request) for request in requests]
    engine.resume()
    for request, handle, borders in zip(requests, handles, ([], [3, 6], []), strict=True):
        events = list(handle.events())
        chunks = [event for event in events if event.kind == "chunk"]
        assert [event.step for event in chunks] == borders
        assert all(len(event.media) == request.num_outputs for event in chunks)
        assert [event.kind for event in events].count("output") == 1
        assert events[-1].kind == "output"
        check_noop(request, handle.result(0))


def test_a_coroutine_reads_the_same_events(make_engine: MakeEngine) -> None:
    engine = make_engine()

    async def read(name: str) -> list[str]:
        return [event.kind async for event in engine.submit(noop(name, steps=3)).aevents()]

    async def read_three() -> list[list[str]]:
        return list(await asyncio.gather(read("a"), read("b"), read("c")))

    assert asyncio.run(read_three()) == [["started", "step", "step", "step", "output"]] * 3

    async def leave_early() -> None:
        async for event in engine.submit(noop("left", steps=2000)).aevents():
            if event.kind == "step":
                break

    asyncio.run(leave_early())
    check_noop(noop("d"), engine.submit(noop("d")).result(10))


def test_a_listener_that_fails_ends_its_own_request_alone(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(mode=mode)

    def listen(event: EngineEvent) -> None:
        if event.kind == "step":
            raise KeyError("no such column")

    engine.pause()
    deaf, good = engine.submit(noop("deaf", steps=9), on_event=listen), engine.submit(noop("good", steps=9))
    engine.resume()
    with pytest.raises(RowFailed, match="its listener failed: KeyError: 'no such column'"):
        deaf.result(10)
    check_noop(noop("good"), good.result(10))


def test_warm_up_runs_each_declared_bucket_within_its_time(make_engine: MakeEngine) -> None:
    ran: list[tuple[int, int, str | None]] = []

    class Watched(Noop):
        def prepare_encode(self, states: Any) -> None:
            ran.extend((s.params.height, s.request.rows, s.request.negative_prompt) for s in states)
            super().prepare_encode(states)

    kinds = (WarmUp(), WarmUp({"height": 32}, rows=3, negative_prompt=""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._FAMILIES, "NoopPipeline", Watched)
        engine = make_engine(warmup=kinds)
        assert ran == [(64, 1, None), (32, 3, "")]
        assert "rows.cond" not in engine.stats()
        make_engine(warmup=kinds, warmup_limit_s=0.0)
        assert len(ran) == 2
        with pytest.raises(LoadError, match=r"the warm-up failed: InvalidRequest: params\.height"):
            make_engine(warmup=(WarmUp({"height": 0}),))


def test_an_engine_is_a_context_manager(models: Any) -> None:
    from saggar.engine import EngineConfig

    with Engine.make(EngineConfig(model=str(models("noop")), executor="local")) as engine:
        assert engine.generate([noop("a")], progress=True)[0].request_id == "a"
    assert not engine.health().ok
