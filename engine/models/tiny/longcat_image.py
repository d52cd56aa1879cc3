"""A tiny LongCat-Image, which leaves prompts as they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saggar.engine.models.tiny.parts import SIZE, bpe_tokenizer, save, vae
from saggar.engine.models.tiny.qwen_parts import PICTURES, qwen_processor, qwen_vl


def build(
    folder: Path,
    seed: int,
    kind: str = "LongCatImagePipeline",
    defaults: Mapping[str, Any] | None = None,
    size: int | None = SIZE,
) -> None:
    """Write it into `folder`, or one of another pipeline."""
    import diffusers

    tokenizer = bpe_tokenizer(special=PICTURES)
    transformer = diffusers.LongCatImageTransformer2DModel(
        in_channels=64,  # the pipelines know no other
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    parts = {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        "vae": vae(latent_channels=16),
        "text_encoder": qwen_vl(tokenizer),
        "tokenizer": tokenizer,
        "text_processor": qwen_processor(tokenizer),
        "transformer": transformer,
    }
    index = {"text_processor": ["transformers", "Qwen2VLProcessor"]}
    own = {"enable_prompt_rewrite": False} if defaults is None else defaults
    save(getattr(diffusers, kind), parts, folder, seed, text=None, defaults=own, size=size, index=index)
