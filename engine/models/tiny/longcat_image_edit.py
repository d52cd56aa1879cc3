"""A tiny LongCat-Image-Edit: its pictures have as many pixels as 64×64."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.longcat_image import build as build_longcat
from saggar.engine.models.tiny.parts import SIZE


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    defaults = {"reference_pixels": SIZE * SIZE}
    build_longcat(folder, seed, "LongCatImageEditPipeline", defaults, size=None)
