"""Z-Image: classifier-free guidance for any scale above 0, cut off late in time and kept short where asked.

Rows may differ in all: size, text of any length, text limit, timestep, guidance. The transformer takes lists and pads
each forward to its longest row, so a batch of unlike sizes costs as much as one of the largest size. Latents have shape
[outputs, channels, h, w] in float32 whatever the model's dtype. It also begins with pictures, which are brought to the
request's size (the pipeline takes none of another). This module knows nothing of the omni form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from saggar.engine.cache.prompt import Encoded
from saggar.engine.models.base import branched
from saggar.engine.models.from_image import FromImage, strength_of
from saggar.engine.models.registry import serves
from saggar.engine.models.state import RequestState, Row
from saggar.engine.models.torch_family import vae_factor
from saggar.engine.parallel.plans import Gather, SequencePlan, Split
from saggar.engine.params import Narrowing
from saggar.engine.request import Request

if TYPE_CHECKING:
    import torch
PATCH = 2
"""Latent pixels of a token, along one side: the first patch size of the transformer, the one that the pipeline uses."""
MULTIPLE = 32
"""The transformer fills up each row's image and text to a multiple of so many tokens."""


@dataclass(frozen=True)
class ZImageParams:
    """Defaults as in each pipeline's __call__; height and width are the checkpoint's.

    `cfg_truncation` ends guidance after that share of the time, above 1 never. `cfg_normalization` keeps a guided
    prediction from being longer than the unguided.
    """

    height: Annotated[int, Field(ge=1, le=16384)] = 1024
    width: Annotated[int, Field(ge=1, le=16384)] = 1024
    num_inference_steps: Annotated[int, Field(ge=1, le=1000)] = 50
    guidance_scale: Annotated[float, Field(ge=0, le=100)] = 5.0
    cfg_normalization: bool = False
    cfg_truncation: Annotated[float, Field(ge=0, le=100)] = 1.0
    max_sequence_length: Annotated[int, Field(ge=1, le=8192)] = 512
    strength: Annotated[float, strength_of("i2i")] = 0.6


State = RequestState["torch.Tensor", ZImageParams, Any]
Rows = Sequence[Row["torch.Tensor", ZImageParams, Any]]


@serves("ZImagePipeline")
class ZImage(FromImage[ZImageParams]):
    """See the module."""

    name = "z-image"
    pipeline = "ZImagePipeline"
    Params = ZImageParams
    tasks = ("t2i", "i2i")
    pipelines: ClassVar = {"i2i": "ZImageImg2ImgPipeline"}
    sequence_plan = SequencePlan(
        {
            "layers.*.attention": ("both",),
            "noise_refiner.*.attention": (),
            "context_refiner.*.attention": (),
        },
        splits={
            "layers.0": {"x": Split(1, stream="both")},
            "layers.*": {"attn_mask": Split(1), "freqs_cis": Split(1)},
        },
        gathers={"all_final_layer.*": Gather(1, "both")},
    )
    masks: ClassVar = {"self": "keys", "refiner": "keys"}
    batch_fields = ()

    def narrowing(self) -> Narrowing:
        """The transformer's table of positions bounds the text, and each side of the image."""
        texts, high, wide = cast("list[int]", self.checkpoint.config("transformer")["axes_lens"])
        cell = PATCH * vae_factor(self.checkpoint.config("vae"))
        grid = {"minimum": cell, "multipleOf": cell}
        # The text's positions start at 1, and the image takes the one after them.
        longest = (texts - 2) // MULTIPLE * MULTIPLE
        return {
            "height": {"default": min(ZImageParams.height, high * cell), "maximum": high * cell, **grid},
            "width": {"default": min(ZImageParams.width, wide * cell), "maximum": wide * cell, **grid},
            "max_sequence_length": {
                "default": min(ZImageParams.max_sequence_length, longest),
                "maximum": longest,
            },
        }

    def cost(self, request: Request) -> int:
        """Tokens of each row and branch."""
        branches = 2 if ZImageParams(**request.params).guidance_scale > 0 else 1  # type: ignore[arg-type]
        return request.rows * branches * self.row_tokens(request)

    def row_tokens(self, request: Request) -> int:
        """Of the image, and of the longest text that the request allows."""
        params = ZImageParams(**request.params)  # type: ignore[arg-type]
        cell = PATCH * vae_factor(self.checkpoint.config("vae"))
        image = (params.height // cell) * (params.width // cell)
        return sum(-(-tokens // MULTIPLE) * MULTIPLE for tokens in (image, params.max_sequence_length))

    def prepare_encode(self, states: Sequence[State]) -> None:
        """Qwen3 for all texts of one limit at once; noise, sampler and shifted timesteps for each request."""
        self.condition_each(states, self._encode, lambda state, _: state.params.max_sequence_length)
        for state in states:
            self._first_latents(state)

    def branches(self, state: State) -> tuple[str, ...]:
        """A second forward for guidance, until it is cut off. Before the first step: what will ever be needed."""
        params = state.params
        # In the timesteps' float32, as the pipeline compares it: a tie falls to the same side.
        gone = float((1000 - state.timesteps[state.step_index]) / 1000) if state.steps else 0.0
        guided = params.guidance_scale > 0 and (params.cfg_truncation > 1 or gone <= params.cfg_truncation)
        return branched(guided)

    def predict(self, rows: Rows, branch: str) -> torch.Tensor:
        """[rows, channels, h, w], smaller rows filled up behind."""
        from saggar.engine.models import common

        latents = [common.pack_latents([row]).to(self._placement.dtype) for row in rows]
        predicted = self._pipe.transformer(
            [one[0].unsqueeze(1) for one in latents],
            (1000 - common.pack_timesteps(rows, latents[0])) / 1000,
            [row.cond(branch, "text")[0] for row in rows],
            return_dict=False,
        )[0]
        return common.join_padded([one.squeeze(1)[None] for one in predicted])

    def combine(self, predictions: Mapping[str, torch.Tensor], state: State) -> torch.Tensor:
        """Guidance beyond the conditional prediction; velocities point from the picture to the noise."""
        assert state.latents is not None
        high, wide = state.latents.shape[2:]
        own = {branch: value[..., :high, :wide].float() for branch, value in predictions.items()}
        cond = own["cond"]
        if "uncond" not in own:
            return -cond
        guided = cond + state.params.guidance_scale * (cond - own["uncond"])
        if state.params.cfg_normalization:
            limit, norm = (value.flatten(1).norm(dim=1).view(-1, 1, 1, 1) for value in (cond, guided))
            guided = guided * (limit / norm).clamp(max=1)
        return -guided

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Forwards of other largest sizes are filled up to the largest of all."""
        from saggar.engine.models import common

        return common.join_padded(pieces)

    def _encode(self, texts: list[str], length: int) -> Sequence[Encoded]:
        # A copy, for the pipeline writes its template into the list that it is given.
        embeds, _ = self._pipe.encode_prompt(
            list(texts),
            device=self._placement.device,
            do_classifier_free_guidance=False,
            max_sequence_length=length,
        )
        return [{"text": one[None]} for one in embeds]

    def _first_latents(self, state: State) -> None:
        import torch
        from saggar.engine.models import common

        params, steps = state.params, state.params.num_inference_steps
        cell = PATCH * self._pipe.vae_scale_factor
        tokens = (params.height // cell) * (params.width // cell)
        common.set_timesteps(
            state,
            self._pipe.scheduler,
            steps,
            sigmas=np.linspace(1.0, 1 / steps, steps),
            mu=common.calculate_shift(tokens, self._pipe.scheduler.config),
        )
        begun = state.request.task in self.pipelines
        dtype = state.conditioning["cond"]["text"].dtype if begun else torch.float32
        latents = self.first_latents(state, self._pipe.transformer.config.in_channels, dtype)
        state.latents = latents.to(torch.float32)

    def images(self, state: State) -> torch.Tensor:
        """In the VAE's dtype."""
        return super().images(state).to(self._pipe.vae.dtype)
