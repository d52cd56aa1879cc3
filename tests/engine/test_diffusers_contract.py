"""Private parts of diffusers and torch that the engine stands on: each in the files named here alone, and still there.
If one fails, the library has moved."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models import attention_dispatch, modeling_utils
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor

ENGINE = Path(__file__).resolve().parents[2] / "engine"
SDPA = {
    f"_scaled_dot_product_{how}"
    for how in ("efficient_attention", "flash_attention", "flash_attention_for_cpu")
}
SLOTS = {"_attention_backend", "_parallel_config"}
REGISTRY = {"_AttentionBackendRegistry", "_backends", "_constraints", "_supported_arg_names"}
USED: dict[str, set[str]] = {
    "attention/backends/torch_sdpa.py": SDPA,
    "attention/base.py": {"_scaled_dot_product_cudnn_attention"},
    "attention/dispatch.py": SLOTS | REGISTRY,
    "memory/compile.py": {"_repeated_blocks"},
    "models/flux2.py": {"_resize_if_exceeds_area"},
    "models/ltx2_decode.py": {
        "_unpack_latents",
        "_denormalize_latents",
        "_unpack_audio_latents",
        "_denormalize_audio_latents",
    },
    "models/qwen_image_layered.py": {"_unpack_latents"},
    "models/source/loading.py": {"_optional_components"},
    "models/tiny/hunyuan_video15.py": {"_get_mllm_prompt_embeds"},
    "parallel/mesh.py": {"_c10d_functional"},
    "parallel/plans.py": {"_cp_plan"},
    "parallel/tiles.py": {"_decode"},
    "platform/cuda_graphs.py": {"_pytree"},
}
VAES = [
    getattr(diffusers, f"Autoencoder{kind}")
    for kind in ("KL", "KLFlux2", "KLQwenImage", "KLWan", "KLHunyuanVideo15", "KLLTX2Video", "DC", "Oobleck")
]
LIBRARIES = ("diffusers", "transformers", "torch")
OURS = {"_hook", "_placement", "_pipe"}  # of objects of this package
PYTHONS = {"_exit", "_name_", "_value_"}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def touched(path: Path) -> Iterator[str]:
    """Private names that a file takes from a library, or asks of anything but itself."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(LIBRARIES):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        ):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            yield from (word.value for word in node.args if isinstance(word, ast.Constant) and word.value)


def test_private_names_are_touched_where_they_are_known() -> None:
    found = {
        str(path.relative_to(ENGINE)): names
        for path in sorted(ENGINE.rglob("*.py"))
        if (names := {name for name in touched(path) if private(str(name))} - OURS - PYTHONS)
    }
    assert found == USED


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (torch.ops.aten, SDPA | {"_scaled_dot_product_cudnn_attention"}),
        (torch.ops, {"_c10d_functional"}),
        (torch.utils, {"_pytree"}),
        (attention_dispatch, {"_AttentionBackendRegistry"}),
        (attention_dispatch._AttentionBackendRegistry, REGISTRY - {"_AttentionBackendRegistry"}),
        (diffusers.FluxTransformer2DModel, {"_repeated_blocks", "_cp_plan"}),
        (modeling_utils.ModelMixin, {"_repeated_blocks", "_cp_plan"}),
        (Flux2ImageProcessor, {"_resize_if_exceeds_area"}),
        (diffusers.LTX2Pipeline, USED["models/ltx2_decode.py"]),
        (diffusers.QwenImageLayeredPipeline, USED["models/qwen_image_layered.py"]),
        *((vae, USED["parallel/tiles.py"]) for vae in VAES),
        (diffusers.DiffusionPipeline, USED["models/source/loading.py"]),
        (diffusers.HunyuanVideo15Pipeline, USED["models/tiny/hunyuan_video15.py"]),
    ],
)
def test_a_private_name_is_still_there(owner: Any, names: set[str]) -> None:
    assert not [name for name in sorted(names) if not hasattr(owner, name)]


def test_processors_have_the_slots_that_a_site_goes_into() -> None:
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

    assert not [slot for slot in SLOTS if not hasattr(FluxAttnProcessor, slot)]
