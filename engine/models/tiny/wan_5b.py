"""A tiny Wan 2.2 TI2V 5B: a timestep for each token, an autoencoder of 16 pixels a latent pixel."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.wan import wan_parts, wan_vae, write


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    from diffusers import WanPipeline

    vae = wan_vae(
        is_residual=True,
        decoder_base_dim=8,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        scale_factor_temporal=4,
    )
    write(WanPipeline, wan_parts(vae), folder, seed, expand_timesteps=True)
