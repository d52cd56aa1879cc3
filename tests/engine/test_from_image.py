"""Tasks that begin with a picture: one loaded model serves them beside the others, and refuses what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saggar.engine import InvalidRequest, Request, open_family

from tests.engine.conftest import MakeEngine
from tests.engine.families import BY_NAME
from tests.engine.media_made import distance
from tests.engine.plain import assert_equal, plain_pipeline

Models = Callable[[str], Path]
PICTURE = np.zeros((64, 64, 3), np.uint8)
MASKED = {"image": [PICTURE], "mask": [PICTURE[..., 0]]}


def test_one_loaded_model_serves_all_its_tasks_at_once(make_engine: MakeEngine, models: Models) -> None:
    engine = make_engine("flux", mode="step_batch", pixels="float32", max_batch=6, warmup=())
    cases = [BY_NAME[name] for name in ("flux", "flux-i2i", "flux-inpaint")]
    asked = [
        (case, replace(request, id=f"{case.name}-{request.id}"))
        for case in cases
        for request in case.requests()
    ]
    assert len({engine.batch_key(engine.validate(request)) for _, request in asked}) == 3
    outputs = engine.generate([request for _, request in asked])
    for (case, request), output in zip(asked, outputs, strict=True):
        assert_equal(output, plain_pipeline(models("flux"), case.name)(request))


def test_what_no_mask_shows_stays(make_engine: MakeEngine) -> None:
    engine = make_engine("flux", pixels="float32", warmup=())
    case = BY_NAME["flux-inpaint"]
    picture = case.request("x", "x", seed=5).inputs["image"][0]
    nothing, all_ = np.zeros((64, 64), np.uint8), np.full((64, 64), 255, np.uint8)

    def drawn(mask: np.ndarray, prompt: str) -> Any:
        inputs = {"image": [picture], "mask": [mask]}
        request = Request(
            "r", prompt, task="inpaint", seed=1, params={"num_inference_steps": 3}, inputs=inputs
        )
        return engine.submit(request).result(60).media

    assert distance(drawn(nothing, "fox"), drawn(nothing, "owl")) == 0.0
    assert distance(drawn(all_, "fox"), drawn(all_, "owl")) > 1e-3


@pytest.mark.parametrize(
    ("model", "task", "params", "inputs", "field"),
    [
        ("flux", "i2i", {"strength": 0.0}, {"image": [PICTURE]}, "params.strength"),
        ("flux", "i2i", {"strength": 1.1}, {"image": [PICTURE]}, "params.strength"),
        ("flux", "i2i", {"strength": 1e-20}, {"image": [PICTURE]}, "params.strength"),
        ("sdxl", "inpaint", {"num_inference_steps": 1}, MASKED, "params.strength"),
        ("flux", "t2i", {"strength": 0.5}, {}, "params.strength"),
        ("flux", "t2i", {}, {"image": [PICTURE]}, "inputs.image"),
        ("flux", "i2i", {}, {}, "inputs.image"),
        ("flux", "i2i", {}, {"image": [PICTURE, PICTURE]}, "inputs.image"),
        ("flux", "inpaint", {}, {"image": [PICTURE]}, "inputs.mask"),
        ("sd3", "inpaint", {}, MASKED, "task"),
        ("sdxl-painter", "t2i", {}, {}, "task"),
        ("sdxl", "inpaint", {"negative_crops_coords_top_left": [1, 2]}, MASKED,
         "params.negative_crops_coords_top_left"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(
    models: Models, model: str, task: str, params: dict[str, Any], inputs: dict[str, Any], field: str
) -> None:
    family = open_family(str(models(model)))
    with pytest.raises(InvalidRequest) as caught:
        family.validate(Request("x", "x", task=task, params=params, inputs=inputs))
    assert caught.value.field == field
    assert caught.value.allowed


def test_a_model_made_for_painting_says_that_it_does_nothing_else(models: Models) -> None:
    info = open_family(str(models("sdxl-painter"))).info("m", 4)
    assert (info.tasks, dict(info.task_inputs)) == (
        ("inpaint",),
        {"inpaint": {"image": (1, 1), "mask": (1, 1)}},
    )
