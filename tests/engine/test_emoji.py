"""The model that comes with the engine, against plain diffusers."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from saggar.engine import Request, installed, open_family
from saggar.engine.models.registry import resolve

from tests.engine.conftest import MakeEngine
from tests.engine.support import at_step, floats

MODEL = "saggar/emoji"
ATOL = 1e-4


def wish(name: str, prompt: str, **params: Any) -> Request:
    """All but the steps is the checkpoint's default; it asks for guidance with an empty negative prompt."""
    return Request(name, prompt, seed=len(prompt), params=params)


WISHES = [
    wish("a", "a red apple", num_inference_steps=2),
    wish("b", "a glossy cat on a blue background", num_inference_steps=4),
    wish("c", "rocket", num_inference_steps=2, true_cfg_scale=1.0),
]


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    """What the plain pipeline draws."""
    pipeline = diffusers.FluxPipeline.from_pretrained(str(resolve(MODEL)))
    pipeline.set_progress_bar_config(disable=True)
    takes = inspect.signature(pipeline.__call__).parameters
    pictures = []
    for request in map(open_family(MODEL).validate, WISHES):
        generator = torch.Generator("cpu").manual_seed(request.seed)
        done = pipeline(
            request.prompt,
            negative_prompt=request.negative_prompt,
            generator=generator,
            output_type="np",
            **{name: value for name, value in request.params.items() if name in takes},
        )
        pictures.append(done.images)
    return pictures


def test_it_is_installed_by_name() -> None:
    assert MODEL in installed()
    request = open_family(MODEL).validate(WISHES[0])
    assert request.negative_prompt == ""
    assert (request.params["height"], request.params["max_sequence_length"]) == (64, 32)


def test_alone_and_in_a_batch(make_engine: MakeEngine, expected: list[np.ndarray]) -> None:
    engine = make_engine(model=MODEL, pixels="float32", threads=None)
    together = engine.generate(WISHES)
    assert {output.batch_size for output in together} == {3}
    for request, output, picture in zip(WISHES, together, expected, strict=True):
        np.testing.assert_allclose(floats(output), picture, atol=ATOL, rtol=0)
        alone = engine.submit(request).result(120)
        np.testing.assert_allclose(floats(alone), picture, atol=ATOL, rtol=0)


def test_joined_midway(make_engine: MakeEngine, expected: list[np.ndarray]) -> None:
    engine = make_engine(model=MODEL, pixels="float32", threads=None, mode="step_batch")
    later: list[Any] = []

    def join() -> None:
        later.extend([engine.submit(WISHES[0]), engine.submit(WISHES[2])])

    first = engine.submit(WISHES[1], on_event=at_step("b", 2, join)).result(120)
    np.testing.assert_allclose(floats(first), expected[1], atol=ATOL, rtol=0)
    for handle, picture in zip(later, (expected[0], expected[2]), strict=True):
        output = handle.result(120)
        assert output.batch_id == first.batch_id
        np.testing.assert_allclose(floats(output), picture, atol=ATOL, rtol=0)
