"""FLUX.2 (dev, klein): dev has its guidance distilled into a number, klein a true one against the empty prompt
unless its steps were distilled.

Rows may differ in text, timestep and guidance; they share height, width and the text's length, because the
transformer takes the positions of all rows from the first: another aspect ratio of as many tokens would go wrong
in silence. The sampler's shift depends on the resolution and on the number of steps. Latents are packed:
[outputs, tokens, channels × 4]. An edit has reference pictures, of whose sizes too only the first row's count. This
module knows nothing of prompts that the encoder rewrites.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from saggar.engine.cache.prompt import Encoded
from saggar.engine.errors import InvalidRequest
from saggar.engine.media import Counts
from saggar.engine.models import references
from saggar.engine.models.base import branched
from saggar.engine.models.packed import CELL, DEFAULT_LATENT, PackedFamily
from saggar.engine.models.registry import serves
from saggar.engine.models.state import RequestState, Row
from saggar.engine.models.torch_family import per_text, vae_factor
from saggar.engine.parallel.plans import SequencePlan
from saggar.engine.params import or_null
from saggar.engine.request import Request

if TYPE_CHECKING:
    import torch
SHORTEST, LONGEST_RATIO = 64, 8
"""Pixels of a reference's short side, and how many times its long side may be longer."""


@dataclass(frozen=True)
class Flux2Params:
    """Defaults as in both pipelines' __call__; height and width are the checkpoint's, or in an edit null, for the first
    reference's.
    """

    height: Annotated[int, Field(ge=1, le=8192, json_schema_extra=or_null(edit=None))] = 1024
    width: Annotated[int, Field(ge=1, le=8192, json_schema_extra=or_null(edit=None))] = 1024
    num_inference_steps: Annotated[int, Field(ge=1, le=1000)] = 50
    guidance_scale: Annotated[float, Field(ge=0, le=100)] = 4.0
    max_sequence_length: Annotated[int, Field(ge=1, le=512)] = 512


State = RequestState["torch.Tensor", Flux2Params, Any]
Rows = Sequence[Row["torch.Tensor", Flux2Params, Any]]


@serves("Flux2Pipeline")
class Flux2(PackedFamily[Flux2Params]):
    """dev."""

    name = "flux2"
    pipeline = "Flux2Pipeline"
    Params = Flux2Params
    tasks = ("t2i", "edit")
    inputs: ClassVar[Mapping[str, Counts]] = {"edit": {"image": (1, references.MOST)}}
    sequence_plan = SequencePlan(
        {
            "transformer_blocks.*.attn": ("text", "image"),
            "single_transformer_blocks.*.attn": ("text", "image"),
        },
        theirs=True,
    )
    # The checkpoint's processor reads images too, for which it needs torchvision; texts need its tokenizer alone.
    loaded_as: ClassVar[Mapping[str, str]] = {"tokenizer": "AutoTokenizer"}

    def preprocess(self, request: Request) -> Request:
        """The pipelines take no negative prompt (an empty one changes nothing) and no odd references."""
        if request.negative_prompt:
            raise InvalidRequest("negative_prompt", "this model takes none", "no negative prompt")
        for index, (height, width) in enumerate(references.sizes(request)):
            short, long = sorted((height, width))
            if short < SHORTEST or long > LONGEST_RATIO * short:
                raise InvalidRequest(
                    f"inputs.image[{index}]",
                    f"{height}×{width} pixels are too few, or too long",
                    f"sides of {SHORTEST} pixels or more, one at most {LONGEST_RATIO} times the other",
                )
        return request

    def params_of(self, request: Request) -> Flux2Params:
        """Sides that are null are those of the first reference, or the usual ones."""
        factor = vae_factor(self.checkpoint.config("vae"))
        known = self._reference_sizes(request, CELL * factor)
        usual = known[0] if known else (DEFAULT_LATENT * factor,) * 2
        sides = zip(("height", "width"), usual, strict=True)
        missing = {name: side for name, side in sides if request.params[name] is None}
        return self._build_params({**request.params, **missing})

    def reference_tokens(self, request: Request) -> int:
        """All of them."""
        cell = CELL * vae_factor(self.checkpoint.config("vae"))
        return sum(high // cell * (wide // cell) for high, wide in self._reference_sizes(request, cell))

    def _reference_sizes(self, request: Request, cell: int) -> list[tuple[int, int]]:
        """Height and width of each as it is encoded: of no more pixels than AREA, on the grid."""
        found = []
        for height, width in references.sizes(request):
            scale = math.sqrt(references.AREA / (height * width)) if height * width > references.AREA else 1
            found.append((int(height * scale) // cell * cell, int(width * scale) // cell * cell))
        return found

    def branches_of(self, params: Flux2Params, request: Request) -> tuple[str, ...]:
        """One forward: guidance is a number that the transformer reads."""
        return ("cond",)

    def guidance(self, rows: Rows, latents: torch.Tensor) -> torch.Tensor | None:
        """That number, for each row."""
        from saggar.engine.models import common

        return common.floats([row.state.params.guidance_scale for row in rows], latents)

    def prepare_encode(self, states: Sequence[State]) -> None:
        """The language model for all texts at once; noise, sampler and shifted timesteps for each request."""
        length = states[0].params.max_sequence_length

        def encode(texts: list[str]) -> Sequence[Encoded]:
            embeds, ids = self._pipe.encode_prompt(
                texts, device=self._placement.device, max_sequence_length=length
            )
            return per_text(text=embeds, ids=ids)

        self.condition(states, encode, variant=length)
        for state in states:
            self._first_latents(state)

    def predict(self, rows: Rows, branch: str) -> torch.Tensor:
        """Velocity [rows, tokens, channels × 4]."""
        from saggar.engine.models import common

        latents = common.pack_latents(rows)
        velocity: torch.Tensor = self._pipe.transformer(
            hidden_states=references.behind(rows, latents),
            timestep=common.pack_timesteps(rows, latents).to(latents.dtype) / 1000,
            guidance=self.guidance(rows, latents),
            encoder_hidden_states=common.pack(rows, branch, "text"),
            txt_ids=rows[0].cond(branch, "ids"),
            img_ids=rows[0].state.extras["image_ids"],
            return_dict=False,
        )[0]
        return velocity[:, : latents.shape[1]]

    def combine(self, predictions: Mapping[str, torch.Tensor], state: State) -> torch.Tensor:
        """True guidance where the request has it."""
        from saggar.engine.models import common

        return common.guided(predictions, state.params.guidance_scale)

    def _first_latents(self, state: State) -> None:
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
        from saggar.engine.models import common

        steps = state.params.num_inference_steps
        state.latents, image_ids = self.draw_latents(state)
        assert state.latents is not None
        state.extras = {"image_ids": image_ids}
        if state.request.task == "edit":
            self._keep_references(state)
        flow = self._pipe.scheduler.config.get("use_flow_sigmas")
        common.set_timesteps(
            state,
            self._pipe.scheduler,
            steps,
            sigmas=None if flow else np.linspace(1.0, 1 / steps, steps),
            mu=compute_empirical_mu(state.latents.shape[1], steps),
        )

    def _keep_references(self, state: State) -> None:
        import torch

        pipe, cell = self._pipe, CELL * self._pipe.vae_scale_factor
        images = []
        for picture, (height, width) in zip(
            references.pictures(state.request), self._reference_sizes(state.request, cell), strict=True
        ):
            fitted = pipe.image_processor._resize_if_exceeds_area(picture, references.AREA)
            images.append(
                pipe.image_processor.preprocess(fitted, height=height, width=width, resize_mode="crop")
            )
        # The VAE's mean is taken: no generator draws.
        latents, ids = pipe.prepare_image_latents(images, 1, None, self._placement.device, pipe.vae.dtype)
        state.extras["references"] = latents
        own = state.extras["image_ids"][:1]
        state.extras["image_ids"] = torch.cat([own, ids.to(own)], dim=1)

    def images(self, state: State) -> torch.Tensor:
        """Packed latents [n, h·w, c·4] to [n, c, 2h, 2w]; the VAE has normalised each of the c·4 by itself."""
        vae, latents = self._pipe.vae, state.latents
        assert latents is not None
        std = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt().to(latents.dtype)
        return self.unpack(latents * std + vae.bn.running_mean.to(latents.dtype), state.params)

    def unscale(self, latents: torch.Tensor) -> torch.Tensor:
        """Done by `images`, while the latents are packed."""
        return latents


@serves("Flux2KleinPipeline")
class Flux2Klein(Flux2):
    """klein: `is_distilled` in model_index.json says that guidance does nothing."""

    name = "flux2-klein"
    pipeline = "Flux2KleinPipeline"
    loaded_as: ClassVar[Mapping[str, str]] = {}

    def branches_of(self, params: Flux2Params, request: Request) -> tuple[str, ...]:
        """A second forward for guidance above 1, which steps that were distilled do without."""
        guided = params.guidance_scale > 1 and not self.checkpoint.index.get("is_distilled", False)
        return branched(guided)

    def guidance(self, rows: Rows, latents: torch.Tensor) -> torch.Tensor | None:
        """The transformer reads none."""
        return None
