"""A tiny Stable Diffusion XL whose guidance is distilled into an embedding, and whose VAE scales each channel."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny import sdxl
from saggar.engine.models.tiny.parts import vae


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    scales = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [0.8, 1.1, 0.9, 1.2]}
    sdxl.build(folder, seed, autoencoder=vae(**scales), time_cond_proj_dim=16)
