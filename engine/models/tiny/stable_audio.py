"""A tiny Stable Audio: a quarter of a second at 16 kHz, 32 samples a latent."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.parts import save, t5, t5_tokenizer


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    from diffusers import (
        AutoencoderOobleck,
        CosineDPMSolverMultistepScheduler,
        StableAudioDiTModel,
        StableAudioPipeline,
        StableAudioProjectionModel,
    )

    transformer = StableAudioDiTModel(
        sample_size=125,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        num_key_value_attention_heads=2,
        out_channels=4,
        cross_attention_dim=32,
        time_proj_dim=16,
        global_states_input_dim=64,
        cross_attention_input_dim=32,
    )
    autoencoder = AutoencoderOobleck(
        encoder_hidden_size=8,
        downsampling_ratios=[2, 4, 4],
        channel_multiples=[1, 1, 2],
        decoder_channels=8,
        decoder_input_channels=4,
        audio_channels=2,
        sampling_rate=16_000,
    )
    parts = {
        "scheduler": CosineDPMSolverMultistepScheduler(),
        "vae": autoencoder,
        "text_encoder": t5(),
        "tokenizer": t5_tokenizer(),
        "projection_model": StableAudioProjectionModel(32, 32, min_value=0, max_value=512),
        "transformer": transformer,
    }
    save(StableAudioPipeline, parts, folder, seed, text=None, size=None)
