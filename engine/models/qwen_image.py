"""Qwen-Image: true guidance with a negative prompt, rescaled so that each token keeps the length it has without.

Rows may differ in text (of any length: the forward is padded to the longest, under a mask), text limit, timestep and
guidance. They share height and width: the transformer takes the positions of all rows from the first, so that another
aspect ratio of as many tokens would go wrong in silence. The sampler's shift depends on the resolution. Latents are
packed: [outputs, tokens, channels × 4]. Edits and layers are other pipelines; this module knows nothing of them. It
also begins with pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from saggar.engine.cache.prompt import Encoded
from saggar.engine.errors import LoadError
from saggar.engine.models.from_image import FromImage, strength_of
from saggar.engine.models.packed import CELL, PackedFamily
from saggar.engine.models.registry import serves
from saggar.engine.models.state import RequestState, Row
from saggar.engine.parallel.plans import SequencePlan
from saggar.engine.params import Narrowing
from saggar.engine.platform.base import Placement
from saggar.engine.request import Request

if TYPE_CHECKING:
    import torch
LONGEST_TEXT = 1024
"""In tokens; the pipeline refuses more."""


@dataclass(frozen=True)
class QwenImageParams:
    """Defaults as in each pipeline's __call__; height and width are the checkpoint's.

    `true_cfg_scale` above 1 together with a negative prompt costs a second forward. The pipeline's `guidance_scale`
    is for distilled models, which its transformer does not run.
    """

    height: Annotated[int, Field(ge=1, le=8192)] = 1024
    width: Annotated[int, Field(ge=1, le=8192)] = 1024
    num_inference_steps: Annotated[int, Field(ge=1, le=1000)] = 50
    true_cfg_scale: Annotated[float, Field(ge=0, le=100)] = 4.0
    max_sequence_length: Annotated[int, Field(ge=1, le=LONGEST_TEXT)] = 512
    strength: Annotated[float, strength_of("i2i")] = 0.6


State = RequestState["torch.Tensor", QwenImageParams, Any]
Rows = Sequence[Row["torch.Tensor", QwenImageParams, Any]]


@serves("QwenImagePipeline")
class QwenImage(FromImage[QwenImageParams], PackedFamily[QwenImageParams]):
    """See the module."""

    name = "qwen-image"
    pipeline = "QwenImagePipeline"
    Params = QwenImageParams
    tasks = ("t2i", "i2i")
    pipelines: ClassVar = {"i2i": "QwenImageImg2ImgPipeline"}
    sequence_plan = SequencePlan({"transformer_blocks.*.attn": ("text", "image")}, theirs=True)
    masks: ClassVar = {"joint": "keys"}
    batch_fields = ("height", "width")
    longest_text = LONGEST_TEXT

    def narrowing(self) -> Narrowing:
        """A schedule that is stretched to its end has two steps: with one, diffusers divides nothing by nothing."""
        steps = {"minimum": 2} if self.checkpoint.config("scheduler").get("shift_terminal") else {}
        return {**super().narrowing(), "num_inference_steps": steps}

    def branches_of(self, params: QwenImageParams, request: Request) -> tuple[str, ...]:
        """A second forward only for true guidance."""
        guided = params.true_cfg_scale > 1 and request.negative_prompt is not None
        return ("cond", "uncond") if guided else ("cond",)

    def load(self, placement: Placement) -> None:
        """LoadError: a transformer with distilled guidance."""
        if self.checkpoint.config("transformer").get("guidance_embeds"):
            raise LoadError(
                f"{self.checkpoint.folder}: transformer: distilled guidance (guidance_embeds) is not supported"
            )
        super().load(placement)

    def prepare_encode(self, states: Sequence[State]) -> None:
        """Qwen2.5-VL for all texts of one limit at once; noise, sampler and shifted timesteps for each request."""
        self.condition_each(states, self._encode, lambda state, _: state.params.max_sequence_length)
        for state in states:
            self._first_latents(state)

    def predict(self, rows: Rows, branch: str) -> torch.Tensor:
        """Velocity [rows, tokens, channels × 4]."""
        from saggar.engine.models import common

        latents = common.pack_latents(rows)
        text, mask = common.pack_ragged(rows, branch, "text")
        velocity: torch.Tensor = self._pipe.transformer(
            hidden_states=latents,
            timestep=common.pack_timesteps(rows, latents).to(latents.dtype) / 1000,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, *self.cells(row.state.params))] for row in rows],
            return_dict=False,
        )[0]
        return velocity

    def combine(self, predictions: Mapping[str, torch.Tensor], state: State) -> torch.Tensor:
        """True guidance where the request has it; each token keeps the norm of its conditional prediction."""
        from saggar.engine.models import common

        cond = predictions["cond"]
        if "uncond" not in predictions:
            return cond
        guided = common.guide(cond, predictions["uncond"], state.params.true_cfg_scale)
        rescale: torch.Tensor = cond.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        return guided * rescale

    def _encode(self, texts: list[str], length: int) -> Sequence[Encoded]:
        embeds, mask = self._pipe.encode_prompt(
            texts, device=self._placement.device, max_sequence_length=length
        )
        # The pipeline gives no mask where all texts are equally long.
        lengths = [embeds.shape[1]] * len(texts) if mask is None else mask.sum(1).tolist()
        return [{"text": embeds[i : i + 1, :tokens]} for i, tokens in enumerate(lengths)]

    def _first_latents(self, state: State) -> None:
        from saggar.engine.models import common

        steps = state.params.num_inference_steps
        high, wide = self.cells(state.params)
        common.set_timesteps(
            state,
            self._pipe.scheduler,
            steps,
            sigmas=np.linspace(1.0, 1 / steps, steps),
            mu=common.calculate_shift(high * wide, self._pipe.scheduler.config),
        )
        channels = self._pipe.transformer.config.in_channels // CELL**2
        state.latents = self.first_latents(state, channels, state.conditioning["cond"]["text"].dtype)

    def unscale(self, latents: torch.Tensor) -> torch.Tensor:
        """Each channel has its own scale."""
        config = self._pipe.vae.config
        mean, std = (
            latents.new_tensor(values).view(1, -1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )
        return latents * std + mean

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """By a VAE of videos, as one frame."""
        return super().decode(latents.unsqueeze(2))[:, :, 0]
