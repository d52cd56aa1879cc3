"""Checkpoints of the same families that differ from the usual: each compared once with plain diffusers, in a batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from saggar.engine import Request

from tests.engine.case import Case
from tests.engine.conftest import MakeEngine
from tests.engine.families import BY_NAME, VARIANTS
from tests.engine.plain import assert_equal, plain_pipeline


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda case: case.name)
def test_other_checkpoints_of_a_family(
    make_engine: MakeEngine, models: Callable[[str], Path], variant: Case
) -> None:
    engine = make_engine(variant.tiny, mode="step_batch", pixels="float32", max_batch=6)
    requests = variant.requests()
    outputs = engine.generate(requests)
    assert {output.batch_size for output in outputs} == {4}
    for request, output in zip(requests, outputs, strict=True):
        assert_equal(output, plain_pipeline(models(variant.tiny), variant.name)(request))


def test_schnell_ignores_the_distilled_guidance_as_the_plain_pipeline_does(make_engine: MakeEngine) -> None:
    engine = make_engine("flux-schnell", pixels="float32", warmup=())
    weak, strong = (
        Request(f"g{scale}", "fox", params={"num_inference_steps": 4, "guidance_scale": scale})
        for scale in (1.0, 7.0)
    )
    first, second = engine.generate([weak, strong])
    assert first.batch_size == 2
    assert_equal(first, second.media)


def test_sd3_without_its_t5(make_engine: MakeEngine, models: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "sd3"
    shutil.copytree(models("sd3"), folder, ignore=shutil.ignore_patterns("text_encoder_3", "tokenizer_3"))
    path = folder / "model_index.json"
    absent = {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    path.write_text(json.dumps(json.loads(path.read_text()) | absent))
    engine = make_engine(model=str(folder), pixels="float32")
    for request, output in zip(
        BY_NAME["sd3"].requests(), engine.generate(BY_NAME["sd3"].requests()), strict=True
    ):
        assert_equal(output, plain_pipeline(folder, "sd3")(request))


def test_sdxl_encodes_an_absent_negative_prompt_where_its_checkpoint_says_so(
    make_engine: MakeEngine, models: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "sdxl"
    shutil.copytree(models("sdxl"), folder)
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"force_zeros_for_empty_prompt": False}))
    engine = make_engine(model=str(folder), pixels="float32", warmup=())
    absent = Request("absent", "fox", seed=2, params={"num_inference_steps": 2})
    outputs = engine.generate([absent, replace(absent, id="empty", negative_prompt="")])
    assert_equal(outputs[0], plain_pipeline(folder, "sdxl")(absent))
    assert_equal(outputs[1], outputs[0].media)


def test_sdxl_marks_pictures_where_its_pipeline_does(make_engine: MakeEngine) -> None:
    class Black:
        def apply_watermark(self, pictures: torch.Tensor) -> torch.Tensor:
            return torch.full_like(pictures, -1)

    engine = make_engine("sdxl", warmup=())
    engine._loops[0].executor._runner.family._pipe.watermark = Black()  # type: ignore[attr-defined]
    output = engine.submit(Request("a", "fox", params={"num_inference_steps": 1})).result(60)
    assert not output.images[0].any()
