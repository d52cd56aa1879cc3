"""Ovis-Image: classifier-free guidance above 1, with an empty negative prompt where none is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import Field
from pydantic.dataclasses import dataclass
from saggar.engine.cache.prompt import Encoded
from saggar.engine.models.joint import JointFamily
from saggar.engine.models.registry import serves
from saggar.engine.models.state import RequestState
from saggar.engine.models.torch_family import per_text

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OvisImageParams:
    """Defaults as in OvisImagePipeline.__call__; height and width are the checkpoint's."""

    height: Annotated[int, Field(ge=1, le=8192)] = 1024
    width: Annotated[int, Field(ge=1, le=8192)] = 1024
    num_inference_steps: Annotated[int, Field(ge=1, le=1000)] = 50
    guidance_scale: Annotated[float, Field(ge=0, le=100)] = 5.0
    max_sequence_length: Annotated[int, Field(ge=1, le=256)] = 256


State: TypeAlias = "RequestState[torch.Tensor, OvisImageParams, Any]"


@serves("OvisImagePipeline")
class OvisImage(JointFamily[OvisImageParams]):
    """See the module."""

    name = "ovis-image"
    pipeline = "OvisImagePipeline"
    Params = OvisImageParams
    longest_text = 256

    def prepare_encode(self, states: Sequence[State]) -> None:
        """Qwen3 for all texts at once, filled up to the length that rows share; noise and sampler for each request."""
        length = states[0].params.max_sequence_length

        def encode(texts: list[str]) -> Sequence[Encoded]:
            embeds, _, ids, _ = self._pipe.encode_prompt(
                texts,
                do_classifier_free_guidance=False,
                device=self._placement.device,
                max_sequence_length=length,
            )
            return [{**one, "ids": ids} for one in per_text(text=embeds)]

        self.condition(states, encode, variant=length)
        for state in states:
            self.schedule(state, flow=True)
            cond = state.conditioning["cond"]
            state.latents, state.extras["image_ids"] = self.draw_latents(state)
            state.extras["text_ids"] = cond["ids"]
