"""Tiny checkpoints of pipelines that no family serves: one with a callback, one with the older one, one with none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from saggar.engine.models.tiny.parts import clip, clip_tokenizer, save, vae


def stable_diffusion(folder: Path) -> None:
    """StableDiffusionPipeline: lists of prompts and generators; PNDM makes one step more than it is asked for."""
    from diffusers import PNDMScheduler, StableDiffusionPipeline

    parts = {
        "scheduler": PNDMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1
        ),
        "vae": vae(),
        "text_encoder": clip(projection=False),
        "tokenizer": clip_tokenizer(),
        "unet": _unet(sample_size=16),
        "safety_checker": None,
        "feature_extractor": None,
    }  # fmt: skip
    save(StableDiffusionPipeline, parts, folder, 0, text=None, requires_safety_checker=False)


def latent_diffusion(folder: Path) -> None:
    """LDMTextToImagePipeline: no callback at all and no negative prompts."""
    from diffusers import AutoencoderKL, DDIMScheduler, LDMTextToImagePipeline

    autoencoder = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        norm_num_groups=4,
        scaling_factor=1.5,
    )
    parts = {
        "scheduler": DDIMScheduler(beta_start=0.00085, beta_end=0.012, clip_sample=False),
        "vqvae": autoencoder,
        "bert": clip(projection=False),
        "tokenizer": clip_tokenizer(),
        "unet": _unet(sample_size=8),
    }
    save(LDMTextToImagePipeline, parts, folder, 0, text=None)


def amused(folder: Path) -> None:
    """AmusedPipeline: the older callback, and one generator for all rows of a call."""
    from diffusers import AmusedPipeline, AmusedScheduler, UVit2DModel, VQModel

    transformer = UVit2DModel(
        hidden_size=8,
        use_bias=False,
        hidden_dropout=0.0,
        cond_embed_dim=32,
        micro_cond_encode_dim=2,
        micro_cond_embed_dim=10,
        encoder_hidden_size=32,
        vocab_size=32,
        codebook_size=32,
        in_channels=8,
        block_out_channels=8,
        num_res_blocks=1,
        block_num_heads=1,
        num_hidden_layers=1,
        num_attention_heads=1,
        attention_dropout=0.0,
        intermediate_size=32,
        layer_norm_eps=1e-06,
        ln_elementwise_affine=True,
    )
    autoencoder = VQModel(
        act_fn="silu",
        block_out_channels=[8],
        down_block_types=["DownEncoderBlock2D"],
        in_channels=3,
        latent_channels=8,
        layers_per_block=1,
        norm_num_groups=8,
        num_vq_embeddings=32,
        out_channels=3,
        sample_size=8,
        up_block_types=["UpDecoderBlock2D"],
        mid_block_add_attention=False,
        lookup_from_codebook=True,
    )
    parts = {
        "scheduler": AmusedScheduler(mask_token_id=31),
        "vqvae": autoencoder,
        "tokenizer": clip_tokenizer(),
        "text_encoder": clip(projection=True),
        "transformer": transformer,
    }
    save(AmusedPipeline, parts, folder, 0, text=None)


def _unet(sample_size: int) -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=sample_size,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(16, 32),
        layers_per_block=1,
        attention_head_dim=(2, 4),
        cross_attention_dim=32,
        norm_num_groups=8,
    )


BUILDERS: dict[str, Callable[[Path], None]] = {
    "sd": stable_diffusion,
    "ldm": latent_diffusion,
    "amused": amused,
}
