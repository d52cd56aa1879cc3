"""A tiny Sana, 4 pixels a latent pixel. Without resolution binning: its smallest table has pictures of 512 pixels."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.parts import gemma, gemma_tokenizer, save


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel

    transformer = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=4,
        attention_head_dim=8,
        num_cross_attention_heads=4,
        cross_attention_head_dim=8,
        cross_attention_dim=32,
        caption_channels=32,
        sample_size=16,
    )
    autoencoder = AutoencoderDC(
        latent_channels=4,
        attention_head_dim=8,
        encoder_block_out_channels=(8, 8, 16),
        decoder_block_out_channels=(8, 8, 16),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()),
        scaling_factor=0.8,
    )
    parts = {
        "scheduler": DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        "vae": autoencoder,
        "text_encoder": gemma(),
        "tokenizer": gemma_tokenizer(),
        "transformer": transformer,
    }
    save(SanaPipeline, parts, folder, seed, defaults={"use_resolution_binning": False})
