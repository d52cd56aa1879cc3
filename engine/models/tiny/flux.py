"""A tiny FLUX.1 with distilled guidance, as dev has it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saggar.engine.models.tiny.parts import clip, clip_tokenizer, save, t5, t5_tokenizer, vae


def build(
    folder: Path,
    seed: int,
    guidance: bool = True,
    scheduler: Any = None,
    kind: str = "FluxPipeline",
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Write it into `folder`, with or without distilled guidance, with another scheduler if one is given, of another
    pipeline, and with more defaults of its parameters.
    """
    import diffusers
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=guidance,
    )
    parts = {
        "scheduler": scheduler or FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        "vae": vae(),
        "text_encoder": clip(projection=False),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": t5(),
        "tokenizer_2": t5_tokenizer(),
        "transformer": transformer,
    }
    save(getattr(diffusers, kind), parts, folder, seed, defaults=defaults)
