"""In bfloat16, as GPUs serve models: what comes out is near what plain diffusers makes in it on the same device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import MakeEngine
from tests.engine.families import BY_NAME
from tests.engine.media_made import facts, mean_distance
from tests.engine.plain import plain_pipeline

FAMILIES = sorted(name for name, case in BY_NAME.items() if not case.once)
NEAR = 0.03


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_of_one_step_in_bfloat16(
    make_engine: MakeEngine, models: Callable[[str], Path], name: str, device: str
) -> None:
    """One: random weights are chaotic, and after some steps the pictures have nothing in common."""
    case = BY_NAME[name]
    requests = [replace(one, params={"num_inference_steps": case.fewest}) for one in case.requests()]
    plain = plain_pipeline(models(case.tiny), name, device, torch.bfloat16)
    executor = "local" if device == "cpu" else "multiproc"
    engine = make_engine(
        case.tiny, device=device, executor=executor, dtype="bfloat16", pixels="float32", max_batch=6
    )
    for request, output in zip(requests, engine.generate(requests), strict=True):
        assert f"bfloat16/{device}" in output.numerics
        expected = plain(request)
        assert facts(output.media) == facts(expected)
        assert mean_distance(output.media, expected) < NEAR, request.id
