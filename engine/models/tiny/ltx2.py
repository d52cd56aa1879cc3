"""A tiny LTX-2.3: 8 pixels and 4 frames a latent one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from saggar.engine.models.tiny.parts import gemma3, gemma_tokenizer, save

BINS = 16
"""Of the mel spectrogram."""
REGISTERS = 16
WIDTH = 32
"""Of the text encoder."""


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    newer = {
        "gated_attn": True,
        "cross_attn_mod": True,
        "audio_gated_attn": True,
        "audio_cross_attn_mod": True,
        "use_prompt_embeddings": False,
        "perturbed_attn": True,
        "rope_type": "split",
    }
    connectors = {
        "rope_type": "split",
        "per_modality_projections": True,
        "audio_connector_num_attention_heads": 2,
        "video_connector_num_learnable_registers": REGISTERS,
        "audio_connector_num_learnable_registers": REGISTERS,
    }
    write("LTX2Pipeline", folder, seed, newer, connectors, {})


def write(
    pipeline: str,
    folder: Path,
    seed: int,
    transformer: dict[str, Any],
    connectors: dict[str, Any],
    vae: dict[str, Any],
) -> None:
    """One of these generations: further words for three of its parts."""
    import diffusers
    from diffusers import FlowMatchEulerDiscreteScheduler, LTX2VideoTransformer3DModel
    from diffusers.pipelines.ltx2 import LTX2TextConnectors

    text_encoder = gemma3()
    parts = {
        "scheduler": FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.95,
            max_shift=2.05,
            base_image_seq_len=1024,
            max_image_seq_len=4096,
            shift_terminal=0.1,
        ),
        "vae": _vae(**vae),
        "audio_vae": _audio_vae(),
        "text_encoder": text_encoder,
        "tokenizer": gemma_tokenizer(),
        "connectors": LTX2TextConnectors(
            caption_channels=WIDTH,
            text_proj_in_factor=text_encoder.config.text_config.num_hidden_layers + 1,
            video_connector_num_attention_heads=4,
            video_connector_attention_head_dim=8,
            video_connector_num_layers=1,
            audio_connector_attention_head_dim=8,
            audio_connector_num_layers=1,
            video_hidden_dim=32,
            audio_hidden_dim=16,
            **connectors,
        ),
        "transformer": LTX2VideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=4,
            attention_head_dim=8,
            cross_attention_dim=32,
            audio_in_channels=8,
            audio_out_channels=8,
            audio_num_attention_heads=4,
            audio_attention_head_dim=4,
            audio_cross_attention_dim=16,
            vae_scale_factors=(4, 8, 8),
            num_layers=2,
            caption_channels=WIDTH,
            **transformer,
        ),
        "vocoder": _vocoder(),
    }
    defaults = {"num_frames": 5, "spatio_temporal_guidance_blocks": [1]}
    save(getattr(diffusers, pipeline), parts, folder, seed, defaults=defaults)


def _vae(**config: Any) -> Any:
    """Its means and deviations are not 0 and 1, so that a mistake with them is seen."""
    from diffusers import AutoencoderKLLTX2Video

    vae = AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8, 16),
        down_block_types=("LTX2VideoDownBlock3D",) * 2,
        decoder_block_out_channels=(8, 16),
        layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, True),
        decoder_spatio_temporal_scaling=(True, True),
        decoder_inject_noise=(False, False, False),
        downsample_type=("spatiotemporal", "spatiotemporal"),
        upsample_type=("spatiotemporal", "spatiotemporal"),
        upsample_residual=(True, True),
        upsample_factor=(2, 2),
        patch_size=2,
        **config,
    )
    vae.latents_mean.copy_(vae.latents_mean.new_tensor([0.1, -0.2, 0.3, 0.0]))
    vae.latents_std.copy_(vae.latents_std.new_tensor([1.5, 0.8, 1.2, 1.0]))
    return vae


def _audio_vae() -> Any:
    from diffusers import AutoencoderKLLTX2Audio

    return AutoencoderKLLTX2Audio(
        base_channels=8,
        output_channels=2,
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        in_channels=2,
        resolution=16,
        latent_channels=2,
        mel_bins=BINS,
    )


def _vocoder() -> Any:
    from diffusers.pipelines.ltx2 import LTX2Vocoder

    return LTX2Vocoder(
        in_channels=2 * BINS,
        hidden_channels=16,
        out_channels=2,
        upsample_kernel_sizes=[8, 4],
        upsample_factors=[4, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3]],
        output_sampling_rate=8000,
    )
