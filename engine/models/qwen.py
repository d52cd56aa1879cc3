"""What the Qwen-Images share: true guidance with a negative prompt, rescaled so that each token keeps the length it has
without.

Rows may differ in text (of any length: the forward is padded to the longest, under a mask), timestep and guidance. They
share height, width and the sizes of references: the transformer takes the positions of all rows from the first, so that
another aspect ratio of as many tokens would go wrong in silence. The sampler's shift depends on the resolution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np
from saggar.engine.errors import LoadError
from saggar.engine.models import references
from saggar.engine.models.base import branched
from saggar.engine.models.packed import PackedFamily
from saggar.engine.models.state import RequestState, Row
from saggar.engine.models.torch_family import DrawnParams
from saggar.engine.parallel.plans import SequencePlan
from saggar.engine.platform.base import Placement
from saggar.engine.request import Request

if TYPE_CHECKING:
    import torch
LONGEST_TEXT = 1024
"""In tokens; the pipelines refuse more."""


class QwenParams(DrawnParams, Protocol):
    """The parameters that the pipelines have in common."""

    @property
    def true_cfg_scale(self) -> float: ...


Q = TypeVar("Q", bound=QwenParams)
Cells = tuple[int, int, int]
"""Frames, height and width of a picture in tokens."""


class QwenFamily(PackedFamily[Q]):
    """See the module."""

    sequence_plan = SequencePlan({"transformer_blocks.*.attn": ("text", "image")}, theirs=True)
    masks: ClassVar = {"joint": "keys"}
    batch_fields: ClassVar[tuple[str, ...]] = ("height", "width")
    longest_text = LONGEST_TEXT

    def branches_of(self, params: Q, request: Request) -> tuple[str, ...]:
        """A second forward only for true guidance."""
        guided = params.true_cfg_scale > 1 and request.negative_prompt is not None
        return branched(guided)

    def load(self, placement: Placement) -> None:
        """LoadError: a transformer with distilled guidance."""
        if self.checkpoint.config("transformer").get("guidance_embeds"):
            raise LoadError(
                f"{self.checkpoint.folder}: transformer: distilled guidance (guidance_embeds) is not supported"
            )
        super().load(placement)

    def shapes(self, state: RequestState[torch.Tensor, Q, Any]) -> list[Cells]:
        """Of the pictures of a row, in the order in which their tokens stand."""
        return [(1, *self.cells(state.params))]

    def predict(self, rows: Sequence[Row[torch.Tensor, Q, Any]], branch: str) -> torch.Tensor:
        """Velocity [rows, tokens, channels × 4]."""
        from saggar.engine.models import common

        latents = common.pack_latents(rows)
        text, mask = common.pack_ragged(rows, branch, "text")
        velocity: torch.Tensor = self._pipe.transformer(
            hidden_states=references.behind(rows, latents),
            timestep=common.pack_timesteps(rows, latents).to(latents.dtype) / 1000,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=mask,
            img_shapes=[self.shapes(row.state) for row in rows],
            return_dict=False,
            **self.more_inputs(latents),
        )[0]
        return velocity[:, : latents.shape[1]]

    def more_inputs(self, latents: torch.Tensor) -> dict[str, Any]:
        """Hook: what else the transformer is given."""
        return {}

    def combine(
        self, predictions: Mapping[str, torch.Tensor], state: RequestState[torch.Tensor, Q, Any]
    ) -> torch.Tensor:
        """True guidance where the request has it; each token keeps the norm of its conditional prediction."""
        from saggar.engine.models import common

        cond = predictions["cond"]
        if "uncond" not in predictions:
            return cond
        guided = common.guide(cond, predictions["uncond"], state.params.true_cfg_scale)
        rescale: torch.Tensor = cond.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        return guided * rescale

    def schedule(self, state: RequestState[torch.Tensor, Q, Any]) -> None:
        """The request's sampler, its shift by the picture's tokens."""
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
