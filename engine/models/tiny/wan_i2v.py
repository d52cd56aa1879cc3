"""A tiny Wan 2.1 for pictures: the transformer reads a picture's tokens beside those of the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from saggar.engine.models.tiny.wan import wan_parts, write

WIDTH = 32
"""Of the picture's tokens."""


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    write_i2v(folder, seed)


def write_i2v(folder: Path, seed: int, **transformer: Any) -> None:
    """Keywords are words of the transformer's configuration. Its text has 512 tokens: that number is fixed there."""
    from diffusers import WanImageToVideoPipeline
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    # Four masks, one a frame of a latent frame, and the picture's latents.
    config = {"in_channels": 12, "image_dim": WIDTH, "added_kv_proj_dim": 24, **transformer}
    vision = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    size = {"height": 32, "width": 32}
    parts = {
        **wan_parts(**config),
        "image_encoder": CLIPVisionModel(vision),
        "image_processor": CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size),
    }
    write(WanImageToVideoPipeline, parts, folder, seed, {"max_sequence_length": 512})
