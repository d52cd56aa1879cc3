"""How weights come to the device: straight, in the wanted dtype, from whatever precision there is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from saggar.engine.errors import LoadError
from saggar.engine.models.source.checkpoint import Checkpoint
from saggar.engine.models.source.loading import load_pipeline
from saggar.engine.models.source.weights import read_weights
from saggar.engine.platform.base import Placement

Models = Callable[[str], Path]
MODULES = ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")


def load(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    placement = Placement("uint8", "", torch.device(device), dtype)
    return load_pipeline("StableDiffusion3Pipeline", Checkpoint(folder), placement)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_has_the_wanted_dtype_and_no_hook_stays(models: Models, dtype: torch.dtype) -> None:
    pipe = load(models("sd3"), dtype)
    for name in MODULES:
        part = getattr(pipe, name)
        assert {value.dtype for value in part.parameters()} == {dtype}, name
        assert not any(value.requires_grad for value in part.parameters())
        assert not part.training
        assert not [module for module in part.modules() if hasattr(module, "_hf_hook")], name
        assert not [module for module in part.modules() if module._forward_hooks or module._forward_pre_hooks]


def test_each_weight_is_the_files(models: Models) -> None:
    plain = diffusers.StableDiffusion3Pipeline.from_pretrained(str(models("sd3")))
    ours = load(models("sd3"))
    for name in MODULES:
        wanted, found = getattr(plain, name).state_dict(), getattr(ours, name).state_dict()
        assert wanted.keys() == found.keys()
        assert all(torch.equal(wanted[key], found[key]) for key in wanted), name


def test_a_variant_is_loaded_where_there_is_nothing_else(models: Models, tmp_path: Path) -> None:
    folder = tmp_path / "sd3"
    half = load(models("sd3"), torch.float16)
    half.save_pretrained(str(folder), variant="fp16", max_shard_size="100KB")
    assert list(folder.glob("*/*fp16-00001*.safetensors")), "shards of a variant are meant too"
    pipe = load(folder, torch.float32)
    for name in MODULES:
        wanted, found = getattr(half, name).state_dict(), getattr(pipe, name).state_dict()
        assert all(torch.equal(wanted[key].float(), found[key].float()) for key in wanted), name
        assert read_weights(folder / name).variant == "fp16"
        assert {value.dtype for value in getattr(pipe, name).parameters()} == {torch.float32}


def test_the_plain_files_go_before_a_variant(models: Models, tmp_path: Path) -> None:
    folder = tmp_path / "sd3"
    shutil.copytree(models("sd3"), folder)
    spoiled = folder / "vae" / "diffusion_pytorch_model.fp16.safetensors"
    spoiled.write_bytes(b"never looked at")
    load(folder)
    assert read_weights(folder / "vae").variant is None


def test_a_damaged_last_part_is_told_before_the_first_is_loaded(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sd3"
    shutil.copytree(models("sd3"), folder)
    (folder / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"")
    loaded: list[str] = []
    monkeypatch.setattr(
        diffusers.SD3Transformer2DModel, "from_pretrained", lambda *_, **__: loaded.append("x")
    )
    with pytest.raises(LoadError, match="vae"):
        load(folder)
    assert not loaded


def test_headers_say_what_is_in_the_files(models: Models) -> None:
    pipe = load(models("sd3"))
    found = read_weights(models("sd3") / "transformer").tensors
    parameters = dict(pipe.transformer.named_parameters())
    assert parameters.keys() <= found.keys()
    for name, value in parameters.items():
        assert (found[name].dtype, found[name].shape) == ("F32", tuple(value.shape))
        assert found[name].bytes == value.numel() * 4 == found[name].values * 4


def test_classes_come_from_the_libraries_and_diffusers_own_pipelines_alone(tmp_path: Path) -> None:
    def index(source: list[str]) -> Checkpoint:
        (tmp_path / "part").mkdir(exist_ok=True)
        content = {"_class_name": "StableDiffusion3Pipeline", "part": source}
        (tmp_path / "model_index.json").write_text(json.dumps(content))
        return Checkpoint(tmp_path)

    placement = Placement("uint8", "", torch.device("cpu"), torch.float32)
    checker = index(["stable_diffusion", "StableDiffusionSafetyChecker"])
    with pytest.raises(LoadError, match="part: there are no weights in safetensors"):  # the class is known
        load_pipeline("StableDiffusion3Pipeline", checker, placement)
    for source in (
        ["os", "system"],
        ["..utils", "logging"],
        ["stable_diffusion", "np"],
        ["no_such", "Thing"],
    ):
        with pytest.raises(LoadError, match=f"component part: .*{source[1]}: this checkpoint needs another"):
            load_pipeline("StableDiffusion3Pipeline", index(source), placement)
