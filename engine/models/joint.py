"""What Ovis-Image and LongCat-Image share: FLUX.1's transformer without pooled text and distilled guidance.

Rows may differ in text, timestep and guidance; they share the size and the text's length, because the transformer takes
one set of positions for all rows. The sampler's shift depends on the resolution. Latents are packed: [outputs, tokens,
channels × 4].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from saggar.engine.models import references
from saggar.engine.models.base import branched
from saggar.engine.models.packed import PackedFamily
from saggar.engine.models.state import RequestState, Row
from saggar.engine.models.torch_family import DrawnParams
from saggar.engine.parallel.plans import Gather, SequencePlan, Split
from saggar.engine.request import Request

if TYPE_CHECKING:
    import torch


class JointParams(DrawnParams, Protocol):
    """The parameters that the pipelines have in common."""

    @property
    def guidance_scale(self) -> float: ...


J = TypeVar("J", bound=JointParams)


class JointFamily(PackedFamily[J]):
    """`extras` hold `text_ids` and `image_ids`, which all rows share."""

    sequence_plan = SequencePlan(
        {
            "transformer_blocks.*.attn": ("text", "image"),
            "single_transformer_blocks.*.attn": ("text", "image"),
        },
        splits={
            "": {
                "hidden_states": Split(1, stream="image"),
                "encoder_hidden_states": Split(1, stream="text"),
                "img_ids": Split(0),
                "txt_ids": Split(0),
            }
        },
        gathers={"proj_out": Gather(1)},
    )

    def branches_of(self, params: J, request: Request) -> tuple[str, ...]:
        """A second forward for guidance above 1."""
        return branched(params.guidance_scale > 1)

    def schedule(self, state: RequestState[torch.Tensor, J, Any], flow: bool = False) -> None:
        """The request's sampler, its shift by the picture's tokens; `flow`: its sigmas are its own where it says so."""
        from saggar.engine.models import common

        config, steps = self._pipe.scheduler.config, state.params.num_inference_steps
        high, wide = self.cells(state.params)
        own = flow and config.get("use_flow_sigmas")
        common.set_timesteps(
            state,
            self._pipe.scheduler,
            steps,
            sigmas=None if own else np.linspace(1.0, 1 / steps, steps),
            mu=common.calculate_shift(high * wide, config),
        )

    def predict(self, rows: Sequence[Row[torch.Tensor, J, Any]], branch: str) -> torch.Tensor:
        """Velocity [rows, tokens, channels × 4]."""
        from saggar.engine.models import common

        latents = common.pack_latents(rows)
        velocity: torch.Tensor = self._pipe.transformer(
            hidden_states=references.behind(rows, latents),
            timestep=common.pack_timesteps(rows, latents).to(latents.dtype) / 1000,
            encoder_hidden_states=common.pack(rows, branch, "text"),
            txt_ids=rows[0].state.extras["text_ids"],
            img_ids=rows[0].state.extras["image_ids"],
            return_dict=False,
        )[0]
        return velocity[:, : latents.shape[1]]

    def combine(
        self, predictions: Mapping[str, torch.Tensor], state: RequestState[torch.Tensor, J, Any]
    ) -> torch.Tensor:
        """Guidance where the request has it."""
        from saggar.engine.models import common

        return common.guided(predictions, state.params.guidance_scale)
