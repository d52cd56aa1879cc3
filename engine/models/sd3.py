"""Stable Diffusion 3 and 3.5: classifier-free guidance above 1, with an empty negative prompt where none is
given.

Rows may differ in text, timestep and guidance; they share height, width and the T5 text's length.
Latents have shape [outputs, channels, h, w].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from saggar.engine.cache.prompt import Encoded
from saggar.engine.models.base import branched
from saggar.engine.models.from_image import FromImage, strength_of
from saggar.engine.models.registry import serves
from saggar.engine.models.state import RequestState, Row
from saggar.engine.models.torch_family import per_text, text_length, vae_factor
from saggar.engine.parallel.plans import Gather, SequencePlan, Split
from saggar.engine.params import Narrowing
from saggar.engine.request import Request

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SD3Params:
    """Defaults as in each pipeline's __call__; height and width are the checkpoint's."""

    height: Annotated[int, Field(ge=1, le=8192)] = 1024
    width: Annotated[int, Field(ge=1, le=8192)] = 1024
    num_inference_steps: Annotated[
        int, Field(ge=1, le=1000, json_schema_extra={"x-defaults": {"i2i": 50}})
    ] = 28
    guidance_scale: Annotated[float, Field(ge=0, le=100)] = 7.0
    max_sequence_length: Annotated[int, Field(ge=1, le=512)] = 256
    strength: Annotated[float, strength_of("i2i")] = 0.6


State = RequestState["torch.Tensor", SD3Params, Any]
Rows = Sequence[Row["torch.Tensor", SD3Params, Any]]


@serves("StableDiffusion3Pipeline")
class SD3(FromImage[SD3Params]):
    """See the module."""

    name = "sd3"
    pipeline = "StableDiffusion3Pipeline"
    Params = SD3Params
    tasks = ("t2i", "i2i")
    pipelines: ClassVar = {"i2i": "StableDiffusion3Img2ImgPipeline"}
    sequence_plan = SequencePlan(
        {"transformer_blocks.*.attn": ("image", "text"), "transformer_blocks.*.attn2": ("image",)},
        splits={
            "transformer_blocks.0": {
                "hidden_states": Split(1, stream="image"),
                "encoder_hidden_states": Split(1, stream="text"),
            }
        },
        gathers={"proj_out": Gather(1)},
    )
    batch_fields = ("height", "width", "max_sequence_length")

    def narrowing(self) -> Narrowing:
        """Grid and largest size follow from VAE, patch and position table."""
        factor, transformer = self._factor(), self.checkpoint.config("transformer")
        cell = factor * int(str(transformer["patch_size"]))
        size = {
            "default": int(str(transformer["sample_size"])) * factor,
            "minimum": cell,
            "maximum": int(str(transformer["pos_embed_max_size"])) * cell,
            "multipleOf": cell,
        }
        text = text_length(self.checkpoint, "tokenizer_3", SD3Params.max_sequence_length)
        return {"height": size, "width": size, "max_sequence_length": text}

    def cost(self, request: Request) -> int:
        """Image and text tokens (77 of CLIP besides T5's) of each row and branch."""
        params = SD3Params(**request.params)  # type: ignore[arg-type]
        cell = self._factor() * int(str(self.checkpoint.config("transformer")["patch_size"]))
        tokens = (params.height // cell) * (params.width // cell) + 77 + params.max_sequence_length
        return request.rows * len(_branches(params)) * tokens

    def prepare_encode(self, states: Sequence[State]) -> None:
        """Three encoders for all texts at once; noise and sampler for each request."""
        length = states[0].params.max_sequence_length

        def encode(texts: list[str]) -> Sequence[Encoded]:
            embeds, _, pooled, _ = self._pipe.encode_prompt(
                texts,
                None,
                None,
                device=self._placement.device,
                do_classifier_free_guidance=False,
                max_sequence_length=length,
            )
            return per_text(text=embeds, pooled=pooled)

        self.condition(states, encode, variant=length)
        for state in states:
            self._first_latents(state, state.conditioning["cond"]["text"].dtype)

    def branches(self, state: State) -> tuple[str, ...]:
        """A second forward for guidance above 1."""
        return _branches(state.params)

    def predict(self, rows: Rows, branch: str) -> torch.Tensor:
        """Velocity [rows, channels, h, w]."""
        from saggar.engine.models import common

        latents = common.pack_latents(rows)
        velocity: torch.Tensor = self._pipe.transformer(
            hidden_states=latents,
            timestep=common.pack_timesteps(rows, latents),
            encoder_hidden_states=common.pack(rows, branch, "text"),
            pooled_projections=common.pack(rows, branch, "pooled"),
            return_dict=False,
        )[0]
        return velocity

    def combine(self, predictions: Mapping[str, torch.Tensor], state: State) -> torch.Tensor:
        """Guidance where the request has it."""
        from saggar.engine.models import common

        return common.guided(predictions, state.params.guidance_scale)

    def _first_latents(self, state: State, dtype: torch.dtype) -> None:
        from saggar.engine.models import common

        params, config, shift = state.params, self._pipe.transformer.config, {}
        if self._pipe.scheduler.config.get("use_dynamic_shifting"):
            cell = self._pipe.vae_scale_factor * config.patch_size
            tokens = (params.height // cell) * (params.width // cell)
            shift = {"mu": common.calculate_shift(tokens, self._pipe.scheduler.config, top=1.16)}
        common.set_timesteps(state, self._pipe.scheduler, params.num_inference_steps, **shift)
        state.latents = self.first_latents(state, config.in_channels, dtype)

    def _factor(self) -> int:
        return vae_factor(self.checkpoint.config("vae"))


def _branches(params: SD3Params) -> tuple[str, ...]:
    return branched(params.guidance_scale > 1)
