"""What the verbs of a plug-in's family call: samplers, noise, pixels, loading. Imports torch and diffusers."""

from saggar.engine.models.common import (
    first_noise,
    floats,
    generators,
    guide,
    join,
    join_padded,
    pack,
    pack_latents,
    pack_ragged,
    pack_scaled_latents,
    pack_timesteps,
    rgb_preview,
    set_timesteps,
    split,
    step,
    to_pixels,
)
from saggar.engine.models.source.loading import load_component, load_pipeline
from saggar.engine.models.source.own_module import Rename, load_own

__all__ = [
    "Rename",
    "first_noise",
    "floats",
    "generators",
    "guide",
    "join",
    "join_padded",
    "load_component",
    "load_own",
    "load_pipeline",
    "pack",
    "pack_latents",
    "pack_ragged",
    "pack_scaled_latents",
    "pack_timesteps",
    "rgb_preview",
    "set_timesteps",
    "split",
    "step",
    "to_pixels",
]
