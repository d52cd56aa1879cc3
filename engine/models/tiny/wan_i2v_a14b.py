"""A tiny Wan 2.2 A14B for pictures, which its two transformers see by their latents alone."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.wan import wan_parts, wan_transformer, write


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    from diffusers import WanImageToVideoPipeline

    parts = {**wan_parts(in_channels=12), "transformer_2": wan_transformer(in_channels=12)}
    write(WanImageToVideoPipeline, parts, folder, seed, boundary_ratio=0.9)
