"""A tiny Wan 2.2 A14B for text: two transformers, the second one's time begins below 0.875."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.wan import wan_parts, wan_transformer, write


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    from diffusers import WanPipeline

    write(
        WanPipeline, {**wan_parts(), "transformer_2": wan_transformer()}, folder, seed, boundary_ratio=0.875
    )
