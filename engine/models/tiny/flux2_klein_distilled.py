"""A tiny FLUX.2 klein whose steps were distilled: guidance does nothing."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.flux2_klein import build as build_klein


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    build_klein(folder, seed, is_distilled=True)
