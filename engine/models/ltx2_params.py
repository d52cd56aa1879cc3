"""LTX-2's parameters, what follows of them for the shape of its latents, and how it guides. No torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, NamedTuple, cast

from pydantic import Field
from pydantic.dataclasses import dataclass
from saggar.engine.models.source.checkpoint import Checkpoint
from saggar.engine.models.torch_family import text_length
from saggar.engine.models.video import frames_grid
from saggar.engine.params import Narrowing
from saggar.engine.request import JsonValue

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

GRID = 32
"""The pipeline refuses sizes that are no multiple of it, whatever the VAE's factor."""
LARGEST = 8192
SOUND_FACTOR = 4
"""Frames of the mel spectrogram that are a latent one: the audio VAE's class fixes it."""
Scale = Annotated[float, Field(ge=0, le=100)]
OfPicture = Field(json_schema_extra={"x-tasks": ["i2v"]})


@dataclass(frozen=True)
class LTX2Params:
    """Defaults as in LTX2Pipeline.__call__. A scale of the sound that is null or 0 is that of the video.

    guidance_scale: above 1, away from the negative prompt. stg_scale: above 0, away from what the model makes without
    attention in `spatio_temporal_guidance_blocks`. modality_scale: above 1, away from video and sound each alone.
    guidance_rescale: how far the result is brought back to the strength of the prompt's prediction.
    `use_cross_timestep` is false for LTX-2.0. `image_crf`: how much the picture is compressed before it is encoded, as
    the model's training videos were; null is the model's own.
    """

    height: Annotated[int, Field(ge=1, le=8192)] = 512
    width: Annotated[int, Field(ge=1, le=8192)] = 768
    num_frames: Annotated[int, Field(ge=1, le=10_001)] = 121
    frame_rate: Annotated[float, Field(gt=0, le=240)] = 24.0
    motion_speed: Annotated[float, Field(gt=0, le=100)] = 1.0
    num_inference_steps: Annotated[int, Field(ge=1, le=1000)] = 30
    guidance_scale: Scale = 3.0
    stg_scale: Scale = 1.0
    modality_scale: Scale = 3.0
    guidance_rescale: Annotated[float, Field(ge=0, le=1)] = 0.7
    audio_guidance_scale: Scale | None = 7.0
    audio_stg_scale: Scale | None = 1.0
    audio_modality_scale: Scale | None = 3.0
    audio_guidance_rescale: Annotated[float, Field(ge=0, le=1)] | None = 0.7
    spatio_temporal_guidance_blocks: tuple[int, ...] = (28,)
    decode_timestep: Annotated[float, Field(ge=0, le=1)] = 0.0
    decode_noise_scale: Annotated[float, Field(ge=0, le=1)] | None = None
    use_cross_timestep: bool = True
    max_sequence_length: Annotated[int, Field(ge=1, le=8192)] = 1024
    image_crf: Annotated[Annotated[int, Field(ge=0, le=51)] | None, OfPicture] = None


class Shape(NamedTuple):
    """Of the latents: frames, height and width of the video, frames of the sound; channels of both."""

    frames: int
    high: int
    wide: int
    sound: int
    channels: tuple[int, int]

    @property
    def video(self) -> int:
        """Tokens of the video."""
        return self.frames * self.high * self.wide

    @property
    def numbers(self) -> tuple[int, int]:
        """How many numbers of an output's latents are the video's, and the sound's."""
        return self.video * self.channels[0], self.sound * self.channels[1]

    @property
    def first_picture(self) -> int:
        """Tokens of the first latent frame."""
        return self.high * self.wide


class Scales(NamedTuple):
    """Guidance of the video, or of the sound."""

    cfg: float
    stg: float
    modality: float
    rescale: float


class Geometry:
    """What a checkpoint makes of the parameters, read from its configurations."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        config = checkpoint.config("vae")
        scaled = cast("bool | list[bool]", config["spatio_temporal_scaling"])
        layers = cast("list[int]", config["layers_per_block"])
        doubled = int(
            2 ** (sum(scaled) if isinstance(scaled, list) else int(bool(scaled)) * (len(layers) - 1))
        )
        self.step, self.factor = (
            self._number("vae", patch) * doubled if config.get(own) is None else self._number("vae", own)
            for own, patch in (
                ("temporal_compression_ratio", "patch_size_t"),
                ("spatial_compression_ratio", "patch_size"),
            )
        )

    def narrowing(self) -> Narrowing:
        """Grid of the pipeline, the VAE and the patches; the last block where the usual one is not there; texts of a
        length that the connectors' registers divide.
        """
        cell = math.lcm(GRID, self.factor * self._number("transformer", "patch_size"))
        size: dict[str, JsonValue] = {"minimum": cell, "multipleOf": cell, "maximum": LARGEST // cell * cell}
        last = self._number("transformer", "num_layers") - 1
        blocks: list[JsonValue] = [min(block, last) for block in LTX2Params.spatio_temporal_guidance_blocks]
        item: dict[str, JsonValue] = {"type": "integer", "minimum": 0, "maximum": last}
        text = text_length(self._checkpoint, "tokenizer", LTX2Params.max_sequence_length, LARGEST)
        return {
            "height": {**size, "default": LTX2Params.height // cell * cell},
            "width": {**size, "default": LTX2Params.width // cell * cell},
            "spatio_temporal_guidance_blocks": {"items": item, "minItems": 1, "default": blocks},
            "num_frames": frames_grid(self.step),
            "max_sequence_length": {**text, **self._registers()},
        }

    def shape(self, params: LTX2Params) -> Shape:
        """Of the latents of one output."""
        rate, hop = (self._number("audio_vae", name) for name in ("sample_rate", "mel_hop_length"))
        seconds = params.num_frames / params.frame_rate
        return Shape(
            (params.num_frames - 1) // self.step + 1,
            params.height // self.factor,
            params.width // self.factor,
            round(seconds * (rate / hop / float(SOUND_FACTOR))),
            (self._number("transformer", "in_channels"), self._number("transformer", "audio_in_channels")),
        )

    def _registers(self) -> dict[str, JsonValue]:
        names = (f"{kind}_connector_num_learnable_registers" for kind in ("video", "audio"))
        counts = [self._checkpoint.config("connectors").get(name) for name in names]
        step = math.lcm(*(int(str(count)) for count in counts if count))
        return {"multipleOf": step, "minimum": step}

    def _number(self, component: str, name: str) -> int:
        return int(str(self._checkpoint.config(component)[name]))


def scales_of(params: LTX2Params) -> tuple[Scales, Scales]:
    """Of the video and of the sound, as the pipeline reads them."""
    video = Scales(params.guidance_scale, params.stg_scale, params.modality_scale, params.guidance_rescale)
    own = (
        params.audio_guidance_scale,
        params.audio_stg_scale,
        params.audio_modality_scale,
        params.audio_guidance_rescale,
    )
    return video, Scales(*(one or two for one, two in zip(own, video, strict=True)))


def branches_of(params: LTX2Params) -> tuple[str, ...]:
    both = scales_of(params)
    wanted = {
        "cond": True,
        "uncond": any(one.cfg > 1 for one in both),
        "stg": any(one.stg > 0 for one in both),
        "alone": any(one.modality > 1 for one in both),
    }
    return tuple(branch for branch, asked in wanted.items() if asked)


def guided(found: Mapping[str, torch.Tensor], own: Scales) -> torch.Tensor:
    """The prompt's picture, moved away from all others, [outputs, numbers]."""
    from diffusers.pipelines.ltx2.pipeline_ltx2 import rescale_noise_cfg

    cond = found["cond"]
    weights = {"uncond": own.cfg - 1, "stg": own.stg, "alone": own.modality - 1}
    guided = cond
    for branch, weight in weights.items():
        if branch in found:
            guided = guided + weight * (cond - found[branch])
    if own.rescale > 0:
        guided = rescale_noise_cfg(guided, cond, guidance_rescale=own.rescale)
    return guided
