"""A tiny Stable Diffusion XL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from saggar.engine.models.tiny.parts import SIZE, clip, clip_tokenizer, save, vae


def build(
    folder: Path, seed: int, autoencoder: Any = None, kind: str = "StableDiffusionXLPipeline", **unet: Any
) -> None:
    """Write it into `folder`, or one of another pipeline, with another VAE or other words for the UNet."""
    import diffusers
    from diffusers import EulerDiscreteScheduler, UNet2DConditionModel

    config = {
        "sample_size": SIZE // 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "attention_head_dim": (2, 4),
        "transformer_layers_per_block": (1, 1),
        "use_linear_projection": True,
        "cross_attention_dim": 64,
        "norm_num_groups": 8,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 32,
    }
    parts = {
        "scheduler": EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", timestep_spacing="leading",
            steps_offset=1,
        ),
        "vae": autoencoder or vae(),
        "text_encoder": clip(projection=False),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": clip(projection=True),
        "tokenizer_2": clip_tokenizer(),
        "unet": UNet2DConditionModel(**(config | unet)),
    }  # fmt: skip
    save(getattr(diffusers, kind), parts, folder, seed, text=None, add_watermarker=False)
