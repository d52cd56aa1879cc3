"""Rows of a batch with the no-op family: each gets its own outputs, and a bad one takes none along."""

from __future__ import annotations

import random
import weakref
from typing import Any

import numpy as np
import pytest
from saggar.engine import OutOfMemory, RowFailed
from saggar.engine.models import registry
from saggar.engine.models.noop import Noop, colour
from saggar.engine.models.registry import serves
from saggar.engine.request import Request

from tests.engine.conftest import MakeEngine
from tests.engine.support import check_noop, noop, settled


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


def test_a_row_without_guidance_runs_no_unconditional_forward(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(mode=mode)
    engine.generate([noop("a", steps=5), noop("b", steps=3, guidance_scale=1.0)])
    assert "forwards.uncond" not in engine.stats()
    engine.generate([noop("a", steps=5), noop("b", steps=3, guidance_scale=2.0, num_outputs=2)])
    stats = engine.stats()
    assert (stats["forwards.uncond"], stats["rows.uncond"]) == (3, 6)
