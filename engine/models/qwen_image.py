"""Qwen-Image: a picture of a prompt, or beginning with a picture.

Rows may also differ in the text's limit. Edits and layers are other pipelines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

from pydantic import Field
from pydantic.dataclasses import dataclass
from saggar.engine.cache.prompt import Encoded
from saggar.engine.models.from_image import FromImage, strength_of
from saggar.engine.models.packed import CELL
from saggar.engine.models.qwen import LONGEST_TEXT, QwenFamily
from saggar.engine.models.registry import serves
from saggar.engine.models.state import RequestState

if TYPE_CHECKING:
    import torch


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


State: TypeAlias = "RequestState[torch.Tensor, QwenImageParams, Any]"


@serves("QwenImagePipeline")
class QwenImage(FromImage[QwenImageParams], QwenFamily[QwenImageParams]):
    """See the module."""

    name = "qwen-image"
    pipeline = "QwenImagePipeline"
    Params = QwenImageParams
    tasks = ("t2i", "i2i")
    pipelines: ClassVar = {"i2i": "QwenImageImg2ImgPipeline"}

    def prepare_encode(self, states: Sequence[State]) -> None:
        """Qwen2.5-VL for all texts of one limit at once; noise, sampler and shifted timesteps for each request."""
        self.condition_each(states, self._encode, lambda state, _: state.params.max_sequence_length)
        channels = self._pipe.transformer.config.in_channels // CELL**2
        for state in states:
            self.schedule(state)
            dtype = state.conditioning["cond"]["text"].dtype
            state.latents = self.first_latents(state, channels, dtype)

    def kept(self, how: int) -> int:
        """As many as the limit says, behind the template's beginning."""
        return how + int(self._pipe.prompt_template_encode_start_idx)

    def _encode(self, texts: list[str], length: int) -> Sequence[Encoded]:
        embeds, mask = self._pipe.encode_prompt(
            texts, device=self._placement.device, max_sequence_length=length
        )
        # The pipeline gives no mask where all texts are equally long.
        lengths = [embeds.shape[1]] * len(texts) if mask is None else mask.sum(1).tolist()
        return [{"text": embeds[i : i + 1, :tokens]} for i, tokens in enumerate(lengths)]
