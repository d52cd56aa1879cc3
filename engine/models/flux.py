"""FLUX.1 (dev, schnell): two forms of guidance, one distilled into a number, one true with a negative prompt. It also
begins with pictures, and paints anew what a mask shows. Kontext has a reference picture.

Rows may differ in text, timestep and both guidances; they share height, width and the text's length,
because the transformer takes one set of positions for all rows. The sampler's shift depends on the
resolution. Latents are packed: [outputs, tokens, channels × 4].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from saggar.engine.cache.prompt import Encoded
from saggar.engine.errors import InvalidRequest
from saggar.engine.media import Counts
from saggar.engine.models import references
from saggar.engine.models.base import branched
from saggar.engine.models.from_image import FromImage, strength_of
from saggar.engine.models.packed import CELL, PackedFamily
from saggar.engine.models.registry import serves
from saggar.engine.models.state import RequestState, Row
from saggar.engine.models.torch_family import per_text, vae_factor
from saggar.engine.parallel.plans import SequencePlan
from saggar.engine.request import Request

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FluxParams:
    """Defaults as in each pipeline's __call__; height and width are the checkpoint's.

    `guidance_scale` is the distilled guidance, ignored by models without it; `true_cfg_scale` above 1
    together with a negative prompt costs a second forward.
    """

    height: Annotated[int, Field(ge=1, le=8192)] = 1024
    width: Annotated[int, Field(ge=1, le=8192)] = 1024
    num_inference_steps: Annotated[int, Field(ge=1, le=1000)] = 28
    guidance_scale: Annotated[
        float, Field(ge=0, le=100, json_schema_extra={"x-defaults": {"i2i": 7.0, "inpaint": 7.0}})
    ] = 3.5
    true_cfg_scale: Annotated[float, Field(ge=0, le=100)] = 1.0
    max_sequence_length: Annotated[int, Field(ge=1, le=512)] = 512
    strength: Annotated[float, strength_of("i2i", "inpaint")] = 0.6


State = RequestState["torch.Tensor", FluxParams, Any]
Rows = Sequence[Row["torch.Tensor", FluxParams, Any]]


@serves("FluxPipeline")
class Flux(FromImage[FluxParams], PackedFamily[FluxParams]):
    """See the module."""

    name = "flux"
    pipeline = "FluxPipeline"
    Params = FluxParams
    tasks: tuple[str, ...] = ("t2i", "i2i", "inpaint")
    pipelines: ClassVar = {"i2i": "FluxImg2ImgPipeline", "inpaint": "FluxInpaintPipeline"}
    tokenizer = "tokenizer_2"
    readers = ("tokenizer_2",)  # CLIP's is for a summary, of 77 tokens at most
    sequence_plan = SequencePlan(
        {
            "transformer_blocks.*.attn": ("text", "image"),
            "single_transformer_blocks.*.attn": ("text", "image"),
        },
        theirs=True,
    )

    def branches_of(self, params: FluxParams, request: Request) -> tuple[str, ...]:
        """A second forward only for true guidance."""
        guided = params.true_cfg_scale > 1 and request.negative_prompt is not None
        return branched(guided)

    def prepare_encode(self, states: Sequence[State]) -> None:
        """T5 and CLIP for all texts at once; noise, sampler and shifted timesteps for each request."""
        length = states[0].params.max_sequence_length

        def encode(texts: list[str]) -> Sequence[Encoded]:
            embeds, pooled, _ = self._pipe.encode_prompt(
                texts, device=self._placement.device, max_sequence_length=length
            )
            return per_text(text=embeds, pooled=pooled)

        self.condition(states, encode, variant=length)
        for state in states:
            self._first_latents(state)

    def predict(self, rows: Rows, branch: str) -> torch.Tensor:
        """Velocity [rows, tokens, channels × 4]."""
        from saggar.engine.models import common

        latents = common.pack_latents(rows)
        guidance = None
        if self._pipe.transformer.config.guidance_embeds:
            guidance = common.floats([row.state.params.guidance_scale for row in rows], latents)
        velocity: torch.Tensor = self._pipe.transformer(
            hidden_states=references.behind(rows, latents),
            timestep=common.pack_timesteps(rows, latents).to(latents.dtype) / 1000,
            guidance=guidance,
            pooled_projections=common.pack(rows, branch, "pooled"),
            encoder_hidden_states=common.pack(rows, branch, "text"),
            txt_ids=rows[0].state.extras["text_ids"],
            img_ids=rows[0].state.extras["image_ids"],
            return_dict=False,
        )[0]
        return velocity[:, : latents.shape[1]]

    def combine(self, predictions: Mapping[str, torch.Tensor], state: State) -> torch.Tensor:
        """True guidance where the request has it."""
        from saggar.engine.models import common

        return common.guided(predictions, state.params.true_cfg_scale)

    def _first_latents(self, state: State) -> None:
        from saggar.engine.models import common

        config, steps = self._pipe.scheduler.config, state.params.num_inference_steps
        high, wide = self.cells(state.params)
        begun = state.request.task in self.pipelines
        asks = self.pipeline == "FluxPipeline" and not begun  # the others have no such question
        flow = asks and config.get("use_flow_sigmas")
        common.set_timesteps(
            state,
            self._pipe.scheduler,
            steps,
            sigmas=None if flow else np.linspace(1.0, 1 / steps, steps),
            mu=common.calculate_shift(high * wide, config),
        )
        text = state.conditioning["cond"]["text"]
        state.extras["text_ids"] = text.new_zeros(text.shape[1], 3)
        self.draw(state, self._pipe.transformer.config.in_channels // CELL**2, text.dtype)

    def draw(self, state: State, channels: int, dtype: torch.dtype) -> None:
        """First latents and their positions."""
        state.latents, *origin, state.extras["image_ids"] = self.first_latents(state, channels, dtype)
        if origin:
            state.extras["noise"], state.extras["origin"] = origin


@dataclass(frozen=True)
class FluxKontextParams(FluxParams):
    """Defaults as in FluxKontextPipeline.__call__.

    Of height and width the ratio counts: the picture has about `max_area` pixels. `auto_resize` brings the reference
    to the nearest of the sizes that the model was trained with; without it, it keeps its own.
    """

    guidance_scale: Annotated[float, Field(ge=0, le=100)] = 3.5
    max_area: Annotated[int, Field(ge=256, le=1 << 26)] = 1024**2
    auto_resize: Annotated[bool, Field(json_schema_extra={"x-tasks": ["edit"]})] = True


@serves("FluxKontextPipeline")
class FluxKontext(Flux):
    """Kontext: one reference picture, or none."""

    name = "flux-kontext"
    pipeline = "FluxKontextPipeline"
    Params = FluxKontextParams
    tasks = ("t2i", "edit")
    pipelines: ClassVar = {}
    inputs: ClassVar[Mapping[str, Counts]] = {"edit": {"image": (1, 1)}}
    batch_fields = ("height", "width", "max_sequence_length", "max_area", "auto_resize")

    def preprocess(self, request: Request) -> Request:
        """A reference that keeps its size has at least one token."""
        cell = CELL * vae_factor(self.checkpoint.config("vae"))
        for height, width in references.sizes(request):
            if min(height, width) < cell:
                raise InvalidRequest(
                    "inputs.image[0]",
                    f"{height}×{width} pixels are too few",
                    f"sides of {cell} pixels or more",
                )
        return super().preprocess(request)

    def params_of(self, request: Request) -> FluxParams:
        """Height and width as they come out. InvalidRequest: nothing is left of one."""
        asked = self._build_params(request.params)
        assert isinstance(asked, FluxKontextParams)
        cell, ratio = CELL * vae_factor(self.checkpoint.config("vae")), asked.width / asked.height
        wide, high = round((asked.max_area * ratio) ** 0.5), round((asked.max_area / ratio) ** 0.5)
        if min(high, wide) < cell:
            raise InvalidRequest(
                "params.max_area", f"{high}×{wide} pixels are too few", f"sides of {cell} pixels or more"
            )
        return replace(asked, height=high // cell * cell, width=wide // cell * cell)

    def reference_tokens(self, request: Request) -> int:
        """Of its own size, or about those of the sizes that it is brought to."""
        cell = CELL * vae_factor(self.checkpoint.config("vae"))
        resized = bool(request.params["auto_resize"])
        found = references.sizes(request)
        return sum(references.AREA // cell**2 if resized else (h // cell) * (w // cell) for h, w in found)

    def draw(self, state: State, channels: int, dtype: torch.dtype) -> None:
        """And the reference, as the VAE has it, in another place of the first axis of positions."""
        import torch
        from saggar.engine.models import common

        params, asked = state.params, state.request
        state.generators = common.generators(asked)
        state.latents, latents, ids, places = self._pipe.prepare_latents(
            self._reference(state) if asked.task == "edit" else None,
            asked.num_outputs,
            channels,
            params.height,
            params.width,
            dtype,
            self._placement.device,
            state.generators,
        )
        state.extras["image_ids"] = ids
        if latents is not None:
            state.extras["references"] = latents[:1]
            state.extras["image_ids"] = torch.cat([ids, places])

    def _reference(self, state: State) -> torch.Tensor:
        from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

        processor, cell = self._pipe.image_processor, CELL * self._pipe.vae_scale_factor
        (picture,) = references.pictures(state.request)
        height, width = processor.get_default_height_width(picture)
        if state.request.params["auto_resize"]:
            ratio = width / height
            _, width, height = min((abs(ratio - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)
        height, width = height // cell * cell, width // cell * cell
        resized = processor.resize(picture, height, width)
        image: torch.Tensor = processor.preprocess(resized, height, width)
        return image
