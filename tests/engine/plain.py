"""The plain pipelines of diffusers that the families are compared with."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
from saggar.engine import Output, Request
from saggar.engine.media import Media
from saggar.engine.models.source.qwen_processor import PictureProcessor

from tests.engine.families import BY_NAME
from tests.engine.media_made import arrays, assert_same

ATOL = 1e-4
Plain = Callable[[Request], list[Media]]


@cache
def plain_pipeline(folder: Path, name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Plain:
    """What the pipeline of a case, loaded from a folder, makes of a request: one call for each output."""
    case = BY_NAME[name]
    index = json.loads((folder / "model_index.json").read_text())
    absent: dict[str, Any] = {name: None for name, value in index.items() if value == [None, None]}
    words = json.loads((folder / "saggar.json").read_text())["params"]
    kind = getattr(diffusers, case.class_name)
    takes = inspect.signature(kind.__call__).parameters
    defaults = {field: own["default"] for field, own in words.items() if field in takes}
    for part in ("processor", "text_processor"):
        if (folder / part).exists():  # its half for videos needs torchvision
            absent[part] = PictureProcessor.from_pretrained(str(folder / part))
    pipeline = kind.from_pretrained(str(folder), dtype=dtype, **absent).to(device)
    pipeline.set_progress_bar_config(disable=True)
    seen: dict[str, list[Media]] = {}

    def run(request: Request) -> list[Media]:
        params = defaults | dict(request.params)
        inputs = [[hash(array.tobytes()) for array in arrays(some)] for some in request.inputs.values()]
        what = repr(
            (request.prompt, request.negative_prompt, request.seed, request.num_outputs, params, inputs)
        )
        if what not in seen:
            seen[what] = [media for i in range(request.num_outputs) for media in one(request, i, params)]
        return seen[what]

    def one(request: Request, index: int, params: dict[str, Any]) -> list[Media]:
        generator = torch.Generator("cpu").manual_seed(request.seed + index)
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
        if request.negative_prompt is not None and case.negative:
            given["negative_prompt"] = request.negative_prompt
        given |= {"prompt": request.prompt, "generator": generator, "output_type": "np"}
        given |= {name: _as(value, device, dtype) for name, value in case.given(request).items()} | case.plain
        return case.made(case.called(pipeline, **given))

    return run


def _as(value: Any, device: str, dtype: torch.dtype) -> Any:
    return value.to(device, dtype) if isinstance(value, torch.Tensor) else value


def assert_equal(output: Output, expected: Sequence[Media]) -> None:
    """Within the tolerance, and no empty media."""
    assert max(float(array.std()) for array in arrays(expected)) > 0.05
    assert_same(output.media, expected, ATOL, output.request_id)
