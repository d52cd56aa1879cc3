"""Reference pictures: which rows may share a forward, how large they get, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from PIL import Image
from saggar.engine import InvalidRequest, Request, open_family
from saggar.engine.models.inputs import shapes

from tests.engine.conftest import MakeEngine
from tests.engine.families import BY_NAME
from tests.engine.media_made import distance
from tests.engine.plain import ATOL, assert_equal, plain_pipeline

Models = Callable[[str], Path]
SIZES = [(1, 1), (3, 2), (2, 3), (16, 9), (1, 4)]


def picture(height: int, width: int) -> np.ndarray:
    return np.zeros((height, width, 3), np.uint8)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("flux2-edit", (64, 128), (128, 64)),
        ("flux-kontext-edit", (48, 64), (64, 48)),
        ("qwen-image-edit", (64, 128), (128, 64)),
    ],
)
def test_a_reference_of_another_shape_and_as_many_tokens_would_go_wrong_in_silence_and_has_its_own_key(
    make_engine: MakeEngine,
    models: Models,
    name: str,
    first: tuple[int, int],
    second: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = BY_NAME[name]
    engine = make_engine(case.tiny, pixels="float32", max_batch=2, warmup=())
    plain = plain_pipeline(models(case.tiny), name)
    requests = [
        case.request(str(size), "a kiln", {"image": (size,)}, seed=size[0], params={"num_inference_steps": 3})
        for size in (first, second)
    ]
    outputs = engine.generate(requests)
    assert [output.batch_size for output in outputs] == [1, 1]
    for request, output in zip(requests, outputs, strict=True):
        assert_equal(output, plain(request))

    monkeypatch.setattr("saggar.engine.models.base.shapes", lambda inputs: "")
    one, other = engine.generate(requests)
    assert [output.batch_size for output in (one, other)] == [2, 2]
    assert_equal(one, plain(requests[0]))
    assert distance(other.media, plain(requests[1])) > 10 * ATOL
    assert shapes(requests[0].inputs) != shapes(requests[1].inputs)


def test_one_text_with_other_pictures_is_another_text(make_engine: MakeEngine, models: Models) -> None:
    case = BY_NAME["qwen-image-edit-plus"]
    engine = make_engine(case.tiny, pixels="float32", max_batch=4, warmup=())
    plain = plain_pipeline(models(case.tiny), case.name)
    requests = [
        case.request(f"s{seed}", "same", seed=seed, params={"num_inference_steps": 2}) for seed in (1, 2)
    ]
    again = replace(requests[0], id="again", seed=9)
    for request, output in zip([*requests, again], engine.generate([*requests, again]), strict=True):
        assert_equal(output, plain(request))
    assert (engine.stats()["prompts.encoded"], engine.stats()["prompts.cached"]) == (2, 0)


def test_kontext_brings_references_to_the_sizes_it_was_trained_with(
    make_engine: MakeEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", [(96, 48), (64, 64), (48, 96)]
    )
    case = BY_NAME["flux-kontext-edit"]
    engine = make_engine(case.tiny, pixels="float32", max_batch=4, warmup=())
    params: Any = {"num_inference_steps": 2, "auto_resize": True}
    kept = case.request("kept", "a kiln", {"image": ((50, 110),)}, params={"num_inference_steps": 2})
    resized = replace(kept, id="resized", params=params)
    outputs = engine.generate([kept, resized])
    for request, output in zip((kept, resized), outputs, strict=True):
        assert_equal(output, plain_pipeline(models(case.tiny), case.name)(request))
    assert distance(outputs[0].media, outputs[1].media) > 10 * ATOL


@pytest.mark.parametrize("ratio", SIZES)
def test_large_references_get_the_sizes_that_the_pipelines_give_them(
    models: Models, ratio: tuple[int, int]
) -> None:
    height, width = (600 * side for side in ratio)
    given = {"image": [picture(height, width)]}

    flux2: Any = open_family(str(models("flux2")))
    brought = Flux2ImageProcessor._resize_if_exceeds_area(Image.new("RGB", (width, height)), 1024 * 1024)
    request = flux2.validate(
        Request("x", "x", task="edit", params={"height": None, "width": None}, inputs=given)
    )
    params = flux2.params_of(request)
    assert (params.width, params.height) == tuple(side // 8 * 8 for side in brought.size)

    qwen: Any = open_family(str(models("qwen-image-edit-plus")))
    request = qwen.validate(
        Request("x", "x", task="edit", params={"reference_pixels": 1024 * 1024}, inputs=given)
    )
    for found, area in ((qwen.reference_sizes(request), 1024 * 1024), (qwen.seen_sizes(request), 384 * 384)):
        wide, high = pipeline_qwenimage_edit_plus.calculate_dimensions(area, width / height)
        assert found == [(high, wide)]

    longcat: Any = open_family(str(models("longcat-image-edit")))
    params = longcat.params_of(
        longcat.validate(
            Request("x", "x", task="edit", params={"reference_pixels": 1024 * 1024}, inputs=given)
        )
    )
    wide, high = pipeline_longcat_image_edit.calculate_dimensions(1024 * 1024, width / height)
    assert (params.height, params.width) == (high, wide)


@pytest.mark.parametrize(
    ("model", "task", "params", "images", "field"),
    [
        ("flux2", "edit", {}, [(63, 64)], "inputs.image[0]"),
        ("flux2", "edit", {}, [(64, 64), (64, 513)], "inputs.image[1]"),
        ("flux2", "edit", {}, [(64, 64)] * 11, "inputs.image"),
        ("flux2", "t2i", {}, [(64, 64)], "inputs.image"),
        ("flux-kontext", "edit", {}, [(64, 64)] * 2, "inputs.image"),
        ("flux-kontext", "edit", {}, [(7, 64)], "inputs.image[0]"),
        ("flux-kontext", "t2i", {"height": 8, "width": 2048}, [], "params.max_area"),
        ("flux-kontext", "t2i", {"auto_resize": True}, [], "params.auto_resize"),
        ("qwen-image-edit", "edit", {}, [(64, 64)] * 2, "inputs.image"),
        ("qwen-image-edit-plus", "edit", {}, [(64, 64), (8, 512)], "inputs.image[1]"),
        ("longcat-image-edit", "edit", {"height": 64}, [(64, 64)], "params.height"),
        ("qwen-image-layered", "edit", {}, [(64, 64)], "task"),
    ],
)
def test_what_cannot_be_is_refused(
    models: Models, model: str, task: str, params: dict[str, Any], images: list[tuple[int, int]], field: str
) -> None:
    family = open_family(str(models(model)))
    inputs = {"image": [picture(*size) for size in images]}
    with pytest.raises(InvalidRequest) as caught:
        family.validate(Request("x", "x", task=task, params=params, inputs=inputs))
    assert caught.value.field == field
    assert caught.value.allowed


def test_a_side_that_is_null_is_the_references_or_the_usual_one(models: Models) -> None:
    family: Any = open_family(str(models("flux2")))
    asked: Any = {"height": None, "width": 32}
    for task, images, expected in (("t2i", [], (512, 32)), ("edit", [picture(72, 100)], (72, 32))):
        request = family.validate(Request("x", "x", task=task, params=asked, inputs={"image": images}))
        assert request.params["height"] is None
        params = family.params_of(request)
        assert (params.height, params.width) == expected
