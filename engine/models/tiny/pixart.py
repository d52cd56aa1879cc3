"""A tiny PixArt-Sigma. Without resolution binning: its smallest table has pictures of 256 pixels."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.parts import save, t5, t5_tokenizer, vae


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    from diffusers import DPMSolverMultistepScheduler, PixArtSigmaPipeline, PixArtTransformer2DModel

    transformer = PixArtTransformer2DModel(
        sample_size=32,
        num_layers=2,
        in_channels=4,
        out_channels=8,
        attention_head_dim=8,
        num_attention_heads=4,
        cross_attention_dim=32,
        caption_channels=32,
        use_additional_conditions=False,
    )
    parts = {
        "scheduler": DPMSolverMultistepScheduler(),
        "vae": vae(),
        "text_encoder": t5(),
        "tokenizer": t5_tokenizer(),
        "transformer": transformer,
    }
    save(PixArtSigmaPipeline, parts, folder, seed, defaults={"use_resolution_binning": False})
