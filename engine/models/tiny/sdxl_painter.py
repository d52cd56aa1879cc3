"""A tiny Stable Diffusion XL made for painting: its UNet is given a mask and the rest of the picture."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.sdxl import build as build_sdxl


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    build_sdxl(folder, seed, kind="StableDiffusionXLInpaintPipeline", in_channels=9)
