"""HunyuanVideo-1.5: text, or a picture with it, to video; two encoders for texts, guidance by a guider of diffusers.

Rows may differ in both texts, timestep, guidance, pictures and number of steps; they share height, width and frames,
with a picture the sizes of the pictures, which decide those of the video. Texts end where their own tokens end: a
forward is filled up to its longest, under masks. With and without a picture are other checkpoints and other keys: the
transformer asks of a whole batch whether it has pictures. Latents are [outputs, channels, frames, h, w].
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as state_class
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from saggar.engine.cache.prompt import Encoded
from saggar.engine.errors import InvalidRequest, LoadError
from saggar.engine.media import Counts
from saggar.engine.models.base import branched
from saggar.engine.models.registry import serves
from saggar.engine.models.source.checkpoint import Checkpoint
from saggar.engine.models.state import RequestState, Row
from saggar.engine.models.video import VideoFamily, frames_grid
from saggar.engine.parallel.plans import Gather, SequencePlan, Split
from saggar.engine.params import Narrowing
from saggar.engine.request import Request

if TYPE_CHECKING:
    import torch
    from saggar.engine.platform.base import Placement
GUIDERS = (
    "ClassifierFreeGuidance",
    "ClassifierFreeZeroStarGuidance",
    "MagnitudeAwareGuidance",
    "TangentialClassifierFreeGuidance",
)
"""Those that combine two predictions, and neither change the transformer nor remember earlier steps."""
TEXT = 1000 + 256
"""Tokens of both texts at most: fixed in the pipeline."""
TEXTS = ("text", "glyphs")
"""The prompt, and what stands in quotes in it."""
LARGEST = 4096
Side = Annotated[
    Annotated[int, Field(ge=1, le=LARGEST)] | None, Field(json_schema_extra={"x-tasks": ["t2v"]})
]


@dataclass(frozen=True)
class HunyuanVideo15Params:
    """Defaults as in HunyuanVideo15Pipeline.__call__; `guidance_scale` is the guider's, `fps` that of the model's own
    videos.

    Height and width are null for the usual size of the checkpoint. With a picture, the picture's shape decides.
    """

    height: Side = None
    width: Side = None
    num_frames: Annotated[int, Field(ge=1, le=4096)] = 121
    num_inference_steps: Annotated[int, Field(ge=1, le=1000)] = 50
    guidance_scale: Annotated[float, Field(ge=0, le=100)] = 7.5
    fps: Annotated[float, Field(ge=1, le=120)] = 24.0


@state_class
class Guided(RequestState["torch.Tensor", HunyuanVideo15Params, Any]):
    """With the request's own guider."""

    guider: Any = None


State = RequestState["torch.Tensor", HunyuanVideo15Params, Any]
Rows = Sequence[Row["torch.Tensor", HunyuanVideo15Params, Any]]


@serves("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline")
class HunyuanVideo15(VideoFamily[HunyuanVideo15Params]):
    """See the module."""

    name = "hunyuan-video15"
    Params = HunyuanVideo15Params
    tasks: tuple[str, ...] = ("t2v", "i2v")
    inputs: ClassVar[Mapping[str, Counts]] = {"i2v": {"image": (1, 1)}}
    graphs = False  # the transformer looks whether there is a picture, and for the texts' tokens
    sequence_plan = SequencePlan(
        {
            "transformer_blocks.*.attn": ("image", "text"),
            "context_embedder.token_refiner.refiner_blocks.*.attn": (),
        },
        splits={
            "transformer_blocks.0": {
                "hidden_states": Split(1, stream="image"),
                "encoder_hidden_states": Split(1, stream="text"),
            },
            "transformer_blocks.*": {"attention_mask": Split(1)},
            "rope": {0: Split(0), 1: Split(0)},
        },
        gathers={"proj_out": Gather(1)},
    )
    masks: ClassVar = {"joint": "keys", "refiner": "any"}
    readers = ("tokenizer",)
    batch_fields = ("height", "width", "num_frames")

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Its task is its pipeline's."""
        super().__init__(checkpoint)
        self.pipeline = checkpoint.class_name
        self.tasks = ("i2v",) if "ImageToVideo" in self.pipeline else ("t2v",)

    def frame_factor(self) -> int:
        """Of the autoencoder."""
        return int(str(self.checkpoint.config("vae").get("temporal_compression_ratio", 4)))

    def narrowing(self) -> Narrowing:
        """The grid is a patch of latents. The guider has a strength of its own."""
        cell = self._cell()
        side = {"type": "integer", "minimum": cell, "maximum": LARGEST // cell * cell, "multipleOf": cell}
        size: dict[str, Any] = {"anyOf": [side, {"type": "null"}]}
        scale = self._guider.get("guidance_scale", HunyuanVideo15Params.guidance_scale)
        return {
            "height": size,
            "width": size,
            "num_frames": frames_grid(self.frame_factor()),
            "guidance_scale": {"default": cast(float, scale)},
        }

    def preprocess(self, request: Request) -> Request:
        """Both sides, or none."""
        params = self._build_params(request.params)
        if (params.height is None) != (params.width is None):
            missing = "height" if params.height is None else "width"
            raise InvalidRequest(f"params.{missing}", "is null and the other side is not", "both or none")
        return super().preprocess(request)

    def cost(self, request: Request) -> int:
        """Tokens of the video and of texts, of each row and branch; all usual sizes have about one area."""
        params = self._build_params(request.params)
        target = int(str(self.checkpoint.config("transformer").get("target_size", 640)))
        area = (params.height or target) * (params.width or target)
        tokens = self.latent_frames(params) * area // self._cell() ** 2 + TEXT
        return request.rows * (2 if self._is_guided(params) else 1) * tokens

    def new_state(self, request: Request) -> Guided:
        """One that holds a guider."""
        return Guided(request, self._build_params(request.params))

    def load(self, placement: Placement) -> None:
        """LoadError: another guider than those that are known to work row by row."""
        from saggar.engine.models.hunyuan_video15_parts import Masks

        source = self.checkpoint.components.get("guider")
        if source is None or source[1] not in GUIDERS:
            raise LoadError(
                f"{self.checkpoint.folder}: guider: {source and source[1]} is not supported: {', '.join(GUIDERS)} are"
            )
        super().load(placement)
        self._masks = Masks(self._pipe.transformer)

    def prepare_encode(self, states: Sequence[State]) -> None:
        """Both encoders for all texts at once; pictures, noise, sampler and guider for each request."""
        from saggar.engine.models import common
        from saggar.engine.models.hunyuan_video15_parts import begin

        for state in states:
            guider = copy.deepcopy(self._pipe.guider)
            guider.guidance_scale = state.params.guidance_scale
            _guided(state).guider = guider
        self.condition(states, self._encode)
        for state in states:
            steps = state.params.num_inference_steps
            sigmas = np.linspace(1.0, 0.0, steps + 1)[:-1]
            common.set_timesteps(state, self._pipe.scheduler, steps, sigmas=sigmas)
            begin(self._pipe, state, self._placement.device)

    def branches(self, state: State) -> tuple[str, ...]:
        """As the guider says of this step; before the first one, all that it will ever ask for."""
        guider = _guided(state).guider
        if state.steps:
            _tell(guider, state)
        return branched(guider.num_conditions > 1)

    def predict(self, rows: Rows, branch: str) -> torch.Tensor:
        """Velocity [rows, channels, frames, h, w]."""
        import torch
        from saggar.engine.models import common
        from saggar.engine.models.hunyuan_video15_parts import real

        latents = common.pack_latents(rows)
        condition, seen = (
            common.join([row.state.extras[name] for row in rows]) for name in ("condition", "image")
        )
        (text, mask), (glyphs, glyph_mask) = (common.pack_ragged(rows, branch, name) for name in TEXTS)
        self._masks.needed = mask is not None or glyph_mask is not None
        velocity: torch.Tensor = self._pipe.transformer(
            hidden_states=torch.cat([latents, condition], dim=1),
            timestep=common.pack_timesteps(rows, latents).to(latents.dtype),
            timestep_r=self._next_timesteps(rows, latents),
            encoder_hidden_states=text,
            encoder_attention_mask=real(text) if mask is None else mask,
            encoder_hidden_states_2=glyphs,
            encoder_attention_mask_2=real(glyphs) if glyph_mask is None else glyph_mask,
            image_embeds=seen,
            return_dict=False,
        )[0]
        return velocity

    def combine(self, predictions: Mapping[str, torch.Tensor], state: State) -> torch.Tensor:
        """The guider's formula."""
        guider = _guided(state).guider
        _tell(guider, state)
        combined: torch.Tensor = guider.forward(predictions["cond"], predictions.get("uncond")).pred
        return combined

    def images(self, state: State) -> torch.Tensor:
        """In the autoencoder's dtype."""
        return super().images(state).to(self._pipe.vae.dtype)

    def unscale(self, latents: torch.Tensor) -> torch.Tensor:
        """Without a shift."""
        scaled: torch.Tensor = latents / self._pipe.vae.config.scaling_factor
        return scaled

    def _encode(self, texts: list[str]) -> Sequence[Encoded]:
        from saggar.engine.models.hunyuan_video15_parts import without_padding

        text, mask, glyphs, glyph_mask = self._pipe.encode_prompt(
            texts,
            device=self._placement.device,
            dtype=self._pipe.transformer.dtype,
            batch_size=len(texts),
        )
        return without_padding(text=(text, mask), glyphs=(glyphs, glyph_mask))

    def _next_timesteps(self, rows: Rows, latents: torch.Tensor) -> torch.Tensor | None:
        """[rows], where the transformer was made for two ends of a step; the pipeline for text gives none."""
        from saggar.engine.models import common

        if not self._pipe.transformer.config.use_meanflow or rows[0].state.request.task != "i2v":
            return None
        following = [row.state.timesteps[row.state.step_index + 1 :] for row in rows]
        return common.floats([float(some[0]) if len(some) else 0.0 for some in following], latents).to(
            latents.dtype
        )

    def _is_guided(self, params: HunyuanVideo15Params) -> bool:
        config = self._guider
        neutral = 0.0 if config.get("use_original_formulation") else 1.0
        return bool(config.get("enabled", True)) and not math.isclose(params.guidance_scale, neutral)

    @property
    def _guider(self) -> Mapping[str, object]:
        return self.checkpoint.read("guider/guider_config.json")

    def _cell(self) -> int:
        patch = int(str(self.checkpoint.config("transformer").get("patch_size", 1)))
        return int(str(self.checkpoint.config("vae").get("spatial_compression_ratio", 16))) * patch


def _guided(state: State) -> Guided:
    assert isinstance(state, Guided)
    return state


def _tell(guider: Any, state: State) -> None:
    """Where the request stands: a guider may begin late or end early."""
    timestep = state.timesteps[state.step_index]
    guider.set_state(step=state.step_index, num_inference_steps=state.steps, timestep=timestep)
