"""A tiny Stable Diffusion 3."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.parts import SIZE, clip, clip_tokenizer, save, t5, t5_tokenizer, vae


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    transformer = SD3Transformer2DModel(
        sample_size=SIZE // 4,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=32,
    )
    parts = {
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
        "vae": vae(),
        "text_encoder": clip(projection=True),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": clip(projection=True),
        "tokenizer_2": clip_tokenizer(),
        "text_encoder_3": t5(width=64),
        "tokenizer_3": t5_tokenizer(),
        "transformer": transformer,
    }
    save(StableDiffusion3Pipeline, parts, folder, seed)
