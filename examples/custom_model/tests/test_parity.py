"""Pictures of the engine against the plain loop, in float32: at most 1e-4 on pixels of 0..1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from plain import Plain
from saggar.engine import Cancelled, Engine, EngineEvent, Output, Request

Start = Callable[..., Engine]
MODES = pytest.mark.parametrize("mode", ["request_batch", "step_batch"])
WISHES = [
    Request("a", "a red fox that runs over the snow, quick and bright", seed=3, params={"steps": 4}),
    Request(
        "b",
        "blue",
        negative_prompt="seven boxes",
        seed=40,
        num_outputs=2,
        params={"steps": 7, "guidance": 5.0},
    ),
    Request("c", "", seed=11, params={"steps": 3, "guidance": 1.0}),
]
"""They differ in the prompt's length, steps, guidance, seeds and outputs."""


def expected(plain: Plain, request: Request) -> list[np.ndarray]:
    params: dict[str, Any] = {"steps": 12, "guidance": 3.0, "height": 64, "width": 64} | dict(request.params)
    size = (params.pop("height"), params.pop("width"))
    seeds = range(request.seed, request.seed + request.num_outputs)
    return [
        plain.draw(request.prompt, request.negative_prompt or "", seed, size=size, **params) for seed in seeds
    ]


def assert_equal(output: Output, pictures: Sequence[np.ndarray]) -> None:
    for picture, other in zip(output.images, pictures, strict=True):
        assert other.std() > 0.05
        np.testing.assert_allclose(picture, other, atol=1e-4, rtol=0)


@MODES
def test_alone(start: Start, plain: Plain, mode: str) -> None:
    engine = start(mode=mode)
    for request in WISHES:
        assert_equal(engine.submit(request).result(60), expected(plain, request))


@MODES
def test_in_a_batch_of_three_unlike_requests(start: Start, plain: Plain, mode: str) -> None:
    outputs = start(mode=mode).generate(WISHES)
    assert {output.batch_size for output in outputs} == {4}
    for request, output in zip(WISHES, outputs, strict=True):
        assert_equal(output, expected(plain, request))


def test_joined_midway(start: Start, plain: Plain) -> None:
    engine = start(mode="step_batch")
    later: list[Any] = []

    def join(event: EngineEvent) -> None:
        if event.kind == "step" and event.step == 2 and not later:
            later.extend(engine.submit(request) for request in (WISHES[0], WISHES[2]))

    first = engine.submit(WISHES[1], on_event=join).result(60)
    assert_equal(first, expected(plain, WISHES[1]))
    for request, handle in zip((WISHES[0], WISHES[2]), later, strict=True):
        output = handle.result(60)
        assert output.batch_id == first.batch_id
        assert_equal(output, expected(plain, request))


def test_in_a_process_of_its_own(start: Start, plain: Plain) -> None:
    engine = start(executor="multiproc", mode="step_batch")
    for request, output in zip(WISHES, engine.generate(WISHES), strict=True):
        assert_equal(output, expected(plain, request))


def test_another_size_is_another_batch(start: Start, plain: Plain) -> None:
    engine = start()
    wide = Request("wide", "a vase", seed=1, params={"height": 32, "width": 72, "steps": 3})
    usual = Request("usual", "a vase", seed=1, params={"steps": 3})
    assert engine.batch_key(wide) != engine.batch_key(usual)
    for request, output in zip((wide, usual), engine.generate([wide, usual]), strict=True):
        assert_equal(output, expected(plain, request))


def test_a_row_without_guidance_pays_for_none(start: Start) -> None:
    engine = start(warmup=())
    engine.generate(WISHES)
    counts = engine.stats()
    assert counts["rows.cond"] == 4 + 2 * 7 + 3
    assert counts["rows.uncond"] == 4 + 2 * 7


def test_a_text_that_is_too_long_is_told(start: Start) -> None:
    (short, long) = start(warmup=()).generate(
        [
            Request("short", "a vase", params={"steps": 2}),
            Request("long", "a vase " * 40, params={"steps": 2}),
        ]
    )
    assert short.unread == {}
    assert list(long.unread) == ["prompt"]
    assert long.unread["prompt"].read_tokens + 1 == 64 < long.unread["prompt"].tokens


def test_steps_are_told_and_a_cancel_takes_effect(start: Start) -> None:
    engine = start()
    seen: list[int] = []

    def watch(event: EngineEvent) -> None:
        if event.kind == "step":
            seen.append(event.step)
            if event.step == 3:
                engine.cancel("long")

    handle = engine.submit(Request("long", "a jug", params={"steps": 500}), on_event=watch)
    with pytest.raises(Cancelled):
        handle.result(60)
    assert seen[:3] == [1, 2, 3]
    assert len(seen) < 500
