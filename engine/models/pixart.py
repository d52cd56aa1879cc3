"""PixArt-Sigma: T5 with a mask, classifier-free guidance above 1, an empty negative prompt where none is given.

Rows may differ in text and its length, timestep, guidance, cleaning of captions and eta; they share height, width,
resolution binning, and the length to which texts are padded. Each request has its own sampler with its history. Latents
have shape [outputs, channels, h, w]. It does not know the resolution and aspect ratio that PixArt-alpha's largest
model is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from saggar.engine.cache.prompt import Encoded
from saggar.engine.models.binned import BinnedFamily
from saggar.engine.models.registry import serves
from saggar.engine.models.state import RequestState, Row
from saggar.engine.models.torch_family import per_text, vae_factor
from saggar.engine.parallel.plans import Gather, SequencePlan, Split

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PixArtParams:
    """Defaults as in PixArtSigmaPipeline.__call__; height and width are the checkpoint's.

    `clean_caption` needs beautifulsoup4 and ftfy; without them texts are only put in lower case, as diffusers does.
    """

    height: Annotated[int, Field(ge=1, le=8192)] = 1024
    width: Annotated[int, Field(ge=1, le=8192)] = 1024
    num_inference_steps: Annotated[int, Field(ge=1, le=1000)] = 20
    guidance_scale: Annotated[float, Field(ge=0, le=100)] = 4.5
    eta: Annotated[float, Field(ge=0, le=1)] = 0.0
    clean_caption: bool = True
    use_resolution_binning: bool = True
    max_sequence_length: Annotated[int, Field(ge=1, le=512)] = 300


State = RequestState["torch.Tensor", PixArtParams, Any]
Rows = Sequence[Row["torch.Tensor", PixArtParams, Any]]


@serves("PixArtSigmaPipeline")
class PixArt(BinnedFamily[PixArtParams]):
    """See the module."""

    name = "pixart"
    pipeline = "PixArtSigmaPipeline"
    Params = PixArtParams
    bins: ClassVar[Mapping[int, int]] = {32: 256, 64: 512, 128: 1024, 256: 2048}
    sequence_plan = SequencePlan(
        {"transformer_blocks.*.attn1": ("image",), "transformer_blocks.*.attn2": ()},
        splits={"transformer_blocks.0": {"hidden_states": Split(1, stream="image")}},
        gathers={"proj_out": Gather(1)},
    )
    masks: ClassVar = {"cross": "any"}
    grid = 8
    usual_text = PixArtParams.max_sequence_length
    largest_latent = 512

    def factor(self) -> int:
        """From the VAE."""
        return vae_factor(self.checkpoint.config("vae"))

    def prepare_encode(self, states: Sequence[State]) -> None:
        """T5 for all texts at once; noise and sampler for each request."""
        length = states[0].params.max_sequence_length

        def encode(texts: list[str], way: tuple[int, bool]) -> Sequence[Encoded]:
            text, mask, _, _ = self._pipe.encode_prompt(
                texts,
                do_classifier_free_guidance=False,
                device=self._placement.device,
                max_sequence_length=way[0],
                clean_caption=way[1],
            )
            return per_text(text=text, mask=mask)

        self.condition_each(states, encode, lambda state, branch: (length, state.params.clean_caption))
        for state in states:
            self.first_latents(state, like=state.conditioning["cond"]["text"])

    def predict(self, rows: Rows, branch: str) -> torch.Tensor:
        """Noise, and with it the variance if the model learned one, [rows, channels or twice as many, h, w]."""
        from saggar.engine.models import common

        latents = common.pack_scaled_latents(rows)
        noise: torch.Tensor = self._pipe.transformer(
            latents,
            encoder_hidden_states=common.pack(rows, branch, "text"),
            encoder_attention_mask=common.pack(rows, branch, "mask"),
            timestep=common.pack_timesteps(rows, latents),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            return_dict=False,
        )[0]
        return noise
