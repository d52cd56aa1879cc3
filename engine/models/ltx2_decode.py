"""LTX-2's latents taken apart, and decoded to a video with its sound. torch is imported when a function is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from saggar.engine.config import Pixels
from saggar.engine.media import Clip, Sound
from saggar.engine.models.ltx2_params import LTX2Params, Shape

if TYPE_CHECKING:
    import torch


def tokens(latents: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents [n, numbers] as [n, tokens, channels] of the video and of the sound."""
    first, rows = shape.numbers[0], len(latents)
    video = latents[:, :first].reshape(rows, shape.video, shape.channels[0])
    return video, latents[:, first:].reshape(rows, shape.sound, shape.channels[1])


def video_of(pipe: Any, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Latents of the video [n, channels, frames, h, w], of the denoiser's scale."""
    patch = (pipe.transformer_spatial_patch_size, pipe.transformer_temporal_patch_size)
    video: torch.Tensor = pipe._unpack_latents(tokens(latents, shape)[0], *shape[:3], *patch)
    return video


def clip(
    pipe: Any,
    latents: torch.Tensor,
    shape: Shape,
    params: LTX2Params,
    noise: torch.Tensor | None,
    pixels: Pixels,
) -> Clip:
    """Latents [1, numbers] decoded. `noise` [1, channels, frames, h, w]: for a VAE that takes a timestep, of which a
    little is mixed in.
    """
    from saggar.engine.models.common import pixel_array

    frames = _frames(pipe, video_of(pipe, latents, shape), params, noise)
    sound = _sound(pipe, tokens(latents, shape)[1], shape)
    return Clip(pixel_array(frames, pixels), params.frame_rate, sound)


def _frames(pipe: Any, video: torch.Tensor, params: LTX2Params, noise: torch.Tensor | None) -> torch.Tensor:
    """[frames, 3, H, W] in -1..1."""
    vae, time = pipe.vae, None
    if noise is not None:
        own = params.decode_timestep
        part = own if params.decode_noise_scale is None else params.decode_noise_scale
        video, time = (1 - part) * video.to(noise) + part * noise, noise.new_tensor([own])
    video = pipe._denormalize_latents(video, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
    frames: torch.Tensor = vae.decode(video.to(vae.dtype), time, return_dict=False)[0][0].transpose(0, 1)
    return frames


def _sound(pipe: Any, sound: torch.Tensor, shape: Shape) -> Sound:
    """By mel spectrogram and vocoder."""
    from saggar.engine.models.common import require_finite

    vae = pipe.audio_vae
    bins = vae.config.mel_bins // pipe.audio_vae_mel_compression_ratio
    sound = pipe._denormalize_audio_latents(sound, vae.latents_mean, vae.latents_std)
    sound = pipe._unpack_audio_latents(sound, shape.sound, num_mel_bins=bins).to(vae.dtype)
    wave = pipe.vocoder(vae.decode(sound, return_dict=False)[0])[0]
    samples = require_finite(wave).float().clamp(-1, 1).T.cpu().contiguous().numpy()
    return Sound(samples, pipe.vocoder.config.output_sampling_rate)
