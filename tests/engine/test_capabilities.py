"""What families and checkpoints say of themselves, and that the docs say the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic.dataclasses import dataclass
from saggar.engine.models.capabilities import all_capabilities, capabilities, markdown
from saggar.engine.models.inspection import inspect_model
from saggar.engine.models.noop import Noop
from saggar.engine.models.source.checkpoint import Checkpoint
from saggar.engine.models.source.loading import load_pipeline
from saggar.engine.models.tiny import make_tiny
from saggar.engine.platform.base import Placement

Models = Callable[[str], Path]
DOCS = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def test_the_docs_are_what_the_code_says() -> None:
    assert DOCS.read_text(encoding="utf-8") == markdown(), "docs/models.md is stale: run `make docs`"


def test_capabilities_follow_from_what_a_family_defines() -> None:
    @dataclass(frozen=True)
    class Params:
        height: int = 1
        width: int = 1
        length: int = 1
        cfg_scale: float = 1.0

    class Mixed(Noop):
        name = "mixed"
        batch_fields = ("length",)
        step_batching = False
        tasks = ("t2i", "i2i")

    Mixed.Params = Params
    can = capabilities(Mixed, ("MixedPipeline",))
    assert (can.shared, can.own) == (("length",), ("height", "width", "cfg_scale"))
    assert can.mixed_sizes
    assert can.guidance == ("cfg_scale",)
    assert (can.batches, can.tasks) == ("by request", ("t2i", "i2i"))
    Mixed.batch_fields = ("height",)
    assert not capabilities(Mixed, ()).mixed_sizes
    noop = {one.family: one for one in all_capabilities()}["noop"]
    assert (noop.batches, noop.streaming, noop.previews) == ("by step, by request", False, True)


def test_parameters_that_say_nothing_to_any_task_are_left_out() -> None:
    found = {one.family: one for one in all_capabilities()}
    assert "strength" in found["flux"].own
    assert "strength" not in found["flux-kontext"].own
    assert "auto_resize" in found["flux-kontext"].shared


def test_listing_and_inspecting_import_no_torch(models: Models) -> None:
    code = (
        "import sys; from saggar.engine.models.capabilities import markdown;"
        "from saggar.engine.models.inspection import inspect_model;"
        f"markdown(); inspect_model({str(models('sd3'))!r});"
        "print([name for name in ('torch', 'diffusers', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_is_what_loading_takes(models: Models, dtype: torch.dtype) -> None:
    folder = models("sd3")
    pipe = load_pipeline(
        "StableDiffusion3Pipeline", Checkpoint(folder), Placement("uint8", "", torch.device("cpu"), dtype)
    )
    found = inspect_model(str(folder))
    assert {part.name for part in found.parts} == {
        "transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"
    }  # fmt: skip
    for part in found.parts:
        module = getattr(pipe, part.name)
        held = {value.data_ptr(): value.nbytes for value in module.state_dict().values()}  # tied ones once
        assert part.loaded[str(dtype).removeprefix("torch.")] == sum(held.values()), part.name
        assert list(part.stored) == ["F32"]
    assert found.loaded["bfloat16"] * 2 == found.loaded["float32"]
    assert json.loads(json.dumps(found.to_dict()))["loaded_bytes"] == found.loaded


def test_what_is_wrong_with_a_component_is_said_and_hides_nothing(models: Models, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(models("sd3"), tmp_path / "sd3"))
    next((folder / "vae").glob("*.safetensors")).write_bytes(b"")
    weights = next((folder / "transformer").glob("*.safetensors"))
    weights.rename(weights.with_suffix(".bin"))
    next((folder / "text_encoder_2").glob("*.safetensors")).unlink()
    parts = {part.name: part for part in inspect_model(str(folder)).parts}
    assert "cut off in its header" in str(parts["vae"].trouble)
    assert "there are no weights in safetensors" in str(parts["text_encoder_2"].trouble)
    assert "a pickle, which could run code" in str(parts["transformer"].trouble)
    assert parts["text_encoder"].trouble is None
    assert parts["text_encoder"].values > 0


def test_a_model_without_components_can_be_inspected(tmp_path: Path) -> None:
    found = inspect_model(str(make_tiny("noop", tmp_path)))
    assert (found.parts, found.loaded) == ((), {"float32": 0, "bfloat16": 0})
