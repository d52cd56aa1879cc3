"""A tiny HunyuanVideo-1.5 for pictures, which SigLIP reads."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.hunyuan_video15 import WIDTH, parts, write


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    from diffusers import HunyuanVideo15ImageToVideoPipeline
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    vision = SiglipVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    made = {
        **parts("i2v"),
        "image_encoder": SiglipVisionModel(vision),
        "feature_extractor": SiglipImageProcessor(size={"height": 32, "width": 32}),
    }
    write(HunyuanVideo15ImageToVideoPipeline, made, folder, seed, height=None, width=None)
