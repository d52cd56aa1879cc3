"""A tiny Wan 2.1 for text. 8 pixels a latent pixel, 4 frames a latent frame, as the real one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saggar.engine.models.tiny.parts import save, t5_tokenizer, umt5

FRAMES = 5
"""Default length of a tiny video, 2 latent frames."""


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    from diffusers import WanPipeline

    write(WanPipeline, wan_parts(), folder, seed)


def write(
    pipeline: Any,
    parts: dict[str, Any],
    folder: Path,
    seed: int,
    defaults: Mapping[str, Any] | None = None,
    **config: Any,
) -> None:
    """As `save`, with few frames."""
    usual = {"num_frames": FRAMES, "num_inference_steps": 4}
    save(pipeline, parts, folder, seed, defaults={**usual, **(defaults or {})}, **config)


def wan_parts(vae: Any = None, **transformer: Any) -> dict[str, Any]:
    """The parts of Wan; keywords replace words of the transformer's configuration."""
    from diffusers import UniPCMultistepScheduler

    return {
        "scheduler": UniPCMultistepScheduler(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            num_train_timesteps=1000,
            flow_shift=3.0,
        ),
        "vae": vae or wan_vae(),
        "text_encoder": umt5(),
        "tokenizer": t5_tokenizer(),
        "transformer": wan_transformer(**transformer),
    }


def wan_transformer(**config: Any) -> Any:
    """Two heads of 12: the axes of positions have 4 channels each."""
    from diffusers import WanTransformer3DModel

    usual: dict[str, Any] = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 32,
        "freq_dim": 32,
        "ffn_dim": 32,
        "num_layers": 2,
    }
    return WanTransformer3DModel(**(usual | config))


def wan_vae(**config: Any) -> Any:
    """Wan's autoencoder; `config` replaces words of its configuration."""
    from diffusers import AutoencoderKLWan

    usual: dict[str, Any] = {
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 1, 2, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.1, -0.2, 0.3, 0.0],
        "latents_std": [1.5, 0.8, 1.2, 1.0],
    }
    return AutoencoderKLWan(**(usual | config))
