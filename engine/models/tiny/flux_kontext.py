"""A tiny FLUX.1 Kontext: its references keep their sizes, and its pictures have as many pixels as 64×64."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.flux import build as build_flux
from saggar.engine.models.tiny.parts import SIZE


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    build_flux(
        folder, seed, kind="FluxKontextPipeline", defaults={"max_area": SIZE * SIZE, "auto_resize": False}
    )
