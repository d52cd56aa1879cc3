"""The engine in the hands of a caller: ids, bad requests, callbacks, streams, pause, warm-up, close."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import psutil
import pytest
from saggar.engine import (
    Engine,
    EngineClosed,
    EngineError,
    EngineEvent,
    InvalidRequest,
    LoadError,
    RowFailed,
    Unsupported,
)
from saggar.engine.config import WarmUp
from saggar.engine.models import registry
from saggar.engine.models.noop import Noop
from saggar.engine.sched.base import Decision
from saggar.engine.sched.policy import KeyedScheduler, Rules

from tests.engine.conftest import MakeEngine
from tests.engine.support import Recorder, at_step, check_noop, eventually, noop, settled


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
        with pytest.raises(Unsupported, match=r"warmup: params\.height"):
            make_engine(warmup=(WarmUp({"height": 0}),))
        with pytest.raises(LoadError, match=r"the warm-up failed: ValueError: asked to fail"):
            make_engine(warmup=(WarmUp({"fail_at": "decode"}),))


def test_an_engine_is_a_context_manager(models: Any) -> None:
    from saggar.engine import EngineConfig

    with Engine.make(EngineConfig(model=str(models("noop")), executor="local")) as engine:
        assert engine.generate([noop("a")], progress=True)[0].request_id == "a"
    assert not engine.health().ok
