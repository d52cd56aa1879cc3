"""Stable Diffusion XL: a UNet that is told sizes and a crop besides the text, with classifier-free guidance above 1.

Rows may differ in text, timestep, guidance and its rescaling, sizes and crop, skipped layers of the text encoders and
eta; they share height and width. Without a negative prompt the second branch gets zeros, if the checkpoint says so.
Each request has its own sampler, which scales the first noise and the input of each step. Latents have shape [outputs,
channels, h, w]. What a mask shows is painted anew, by a UNet for pictures of prompts, or one made for it that is given
the mask and the rest of the picture in each step, and serves that task alone. It does not know images as prompts, the
refiner, or a second prompt for the second encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

from pydantic import Field
from pydantic.dataclasses import dataclass
from saggar.engine.cache.prompt import Encoded
from saggar.engine.models.base import branched
from saggar.engine.models.from_image import FromImage, strength_of
from saggar.engine.models.registry import serves
from saggar.engine.models.source.checkpoint import Checkpoint
from saggar.engine.models.state import RequestState, Row
from saggar.engine.models.torch_family import per_text, vae_factor
from saggar.engine.parallel.plans import Gather, SequencePlan, Split
from saggar.engine.params import Narrowing
from saggar.engine.request import Request

if TYPE_CHECKING:
    import torch
    from saggar.engine.platform.base import Placement

Pair: TypeAlias = Annotated[
    tuple[Annotated[int, Field(ge=0, le=1 << 20)], ...], Field(min_length=2, max_length=2)
]
"""Height and width, or top and left."""
LARGEST_LATENT = 512
GRID = 8
"""The pipeline takes no finer sizes, whatever the VAE."""
ZEROS = "zeros"
ATTENTIONS = ("down_blocks.*.attentions.*", "mid_block.attentions.*", "up_blocks.*.attentions.*")
"""Where a UNet attends: each a stack of transformer blocks over the pixels of its level."""
PAINTER = 9
"""Channels of a UNet made for painting: latents, a mask, latents of the rest of the picture."""


@dataclass(frozen=True)
class SDXLParams:
    """Defaults as in each pipeline's __call__; height and width are the checkpoint's.

    A size that is null is the picture's own; the negative ones count only where both are given, and each for itself in
    inpaint.
    """

    height: Annotated[int, Field(ge=1, le=8192)] = 1024
    width: Annotated[int, Field(ge=1, le=8192)] = 1024
    num_inference_steps: Annotated[int, Field(ge=1, le=1000)] = 50
    guidance_scale: Annotated[
        float, Field(ge=0, le=100, json_schema_extra={"x-defaults": {"inpaint": 7.5}})
    ] = 5.0
    guidance_rescale: Annotated[float, Field(ge=0, le=1)] = 0.0
    eta: Annotated[float, Field(ge=0, le=1)] = 0.0
    original_size: Pair | None = None
    crops_coords_top_left: Pair = (0, 0)
    target_size: Pair | None = None
    negative_original_size: Pair | None = None
    negative_crops_coords_top_left: Annotated[Pair, Field(json_schema_extra={"x-tasks": ["t2i"]})] = (0, 0)
    negative_target_size: Pair | None = None
    clip_skip: Annotated[int, Field(ge=0)] | None = None
    strength: Annotated[float, strength_of("inpaint")] = 0.9999


State = RequestState["torch.Tensor", SDXLParams, Any]
Rows = Sequence[Row["torch.Tensor", SDXLParams, Any]]


@serves("StableDiffusionXLPipeline", "StableDiffusionXLInpaintPipeline")
class SDXL(FromImage[SDXLParams]):
    """See the module."""

    name = "sdxl"
    pipeline = "StableDiffusionXLPipeline"
    Params = SDXLParams
    tasks: tuple[str, ...] = ("t2i", "inpaint")
    pipelines: ClassVar = {"inpaint": "StableDiffusionXLInpaintPipeline"}
    batch_fields = ("height", "width")
    # Attentions and feed-forwards are shared by pixels at each level; convolutions, which mix neighbours, are not.
    sequence_plan: SequencePlan | None = SequencePlan(
        {f"{place}.transformer_blocks.*.attn1": ("image",) for place in ATTENTIONS}
        | {f"{place}.transformer_blocks.*.attn2": () for place in ATTENTIONS},
        splits={f"{place}.proj_in": {"input": Split(1, stream="image")} for place in ATTENTIONS},
        gathers={f"{place}.proj_out": Gather(1) for place in ATTENTIONS},
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._painter = checkpoint.config("unet").get("in_channels") == PAINTER
        if self._painter:
            self.tasks = ("inpaint",)
        if not checkpoint.config("unet").get("use_linear_projection"):
            self.sequence_plan = None  # its projections are convolutions of whole pictures
        # A distilled UNet takes the guidance as an embedding and needs no second forward.
        self._embedded = checkpoint.config("unet").get("time_cond_proj_dim") is not None

    def narrowing(self) -> Narrowing:
        """The grid is the pipeline's; no text encoder skips more layers than it has."""
        factor, unet = vae_factor(self.checkpoint.config("vae")), self.checkpoint.config("unet")
        size = {
            "default": int(str(unet.get("sample_size") or 128)) * factor,
            "minimum": max(GRID, factor * vae_factor(unet)),
            "maximum": LARGEST_LATENT * factor,
            "multipleOf": max(GRID, factor),
        }
        encoders = [
            name for name in ("text_encoder", "text_encoder_2") if self.checkpoint.components.get(name)
        ]
        layers = min(int(str(self.checkpoint.config(name)["num_hidden_layers"])) for name in encoders)
        skip = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": layers - 1}, {"type": "null"}]}
        return {"height": size, "width": size, "clip_skip": skip}  # type: ignore[dict-item]

    def cost(self, request: Request) -> int:
        """Latent pixels of each row and branch."""
        params = SDXLParams(**request.params)  # type: ignore[arg-type]
        factor = vae_factor(self.checkpoint.config("vae"))
        return (
            request.rows * len(self._branches(params)) * (params.height // factor) * (params.width // factor)
        )

    def load(self, placement: Placement) -> None:
        """Its VAE overflows in float16 where it says so, and is then kept in float32."""
        super().load(placement)
        self._upcast()

    def _upcast(self) -> None:
        vae = self._pipe.vae
        if vae.config.force_upcast and str(vae.dtype) == "torch.float16":
            vae.float()

    def steps_of(self, params: SDXLParams) -> int:
        """Rounded down."""
        return min(int(params.num_inference_steps * params.strength), params.num_inference_steps)

    def prepare_encode(self, states: Sequence[State]) -> None:
        """Two encoders for all texts at once; sizes, sampler and noise for each request."""
        self.condition_each(states, self._encode, self._way)
        for state in states:
            self._first_latents(state)

    def branches(self, state: State) -> tuple[str, ...]:
        """A second forward for guidance above 1."""
        return self._branches(state.params)

    def predict(self, rows: Rows, branch: str) -> torch.Tensor:
        """Noise, or whatever the sampler wants predicted, [rows, channels, h, w]."""
        import torch
        from saggar.engine.models import common

        latents = common.pack_scaled_latents(rows)
        given = [common.pack_extra(rows, name) for name in ("mask", "unmasked")] if self._painter else []
        noise: torch.Tensor = self._pipe.unet(
            torch.cat([latents, *given], dim=1),
            common.pack_timesteps(rows, latents),
            encoder_hidden_states=common.pack(rows, branch, "text"),
            timestep_cond=self._guidance_embedding(rows, latents) if self._embedded else None,
            added_cond_kwargs={
                "text_embeds": common.pack(rows, branch, "pooled"),
                "time_ids": common.pack(rows, branch, "sizes"),
            },
            return_dict=False,
        )[0]
        return noise

    def combine(self, predictions: Mapping[str, torch.Tensor], state: State) -> torch.Tensor:
        """Guidance where the request has it, brought back to the strength of the prompt's branch if asked."""
        from diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl import rescale_noise_cfg
        from saggar.engine.models import common

        cond, params = predictions["cond"], state.params
        if "uncond" not in predictions:
            return cond
        noise = common.guide(cond, predictions["uncond"], params.guidance_scale)
        if params.guidance_rescale > 0:
            noise = rescale_noise_cfg(noise, cond, params.guidance_rescale)
        return noise

    def step_scheduler(self, state: State, noise: torch.Tensor) -> None:
        """The request's own sampler; eta is for those that know it."""
        from saggar.engine.models import common

        common.step(state, noise, eta=state.params.eta)
        self.blend(state)

    def unscale(self, latents: torch.Tensor) -> torch.Tensor:
        """By mean and standard deviation of each channel where the VAE has them."""
        vae = self._pipe.vae
        scaled: torch.Tensor = latents.to(vae.dtype) / vae.config.scaling_factor
        mean, std = (vae.config.get(name) for name in ("latents_mean", "latents_std"))
        if mean is None or std is None:
            return scaled
        std, mean = (scaled.new_tensor(values).view(1, -1, 1, 1) for values in (std, mean))
        return scaled * std + mean

    def finish(self, pictures: torch.Tensor, params: SDXLParams) -> torch.Tensor:
        """The invisible watermark, where the pipeline makes one."""
        mark = self._pipe.watermark
        marked: torch.Tensor = pictures if mark is None else mark.apply_watermark(pictures)
        return marked

    def _branches(self, params: SDXLParams) -> tuple[str, ...]:
        return branched(params.guidance_scale > 1 and not self._embedded)

    def _way(self, state: State, branch: str) -> int | str | None:
        """How a branch's text is encoded: with layers skipped, as zeros, or plainly."""
        if branch == "cond":
            return state.params.clip_skip
        absent = state.request.negative_prompt is None
        return ZEROS if absent and self._pipe.config.force_zeros_for_empty_prompt else None

    def _encode(self, texts: list[str], way: int | str | None) -> Sequence[Encoded]:
        text, _, pooled, _ = self._pipe.encode_prompt(
            texts,
            device=self._placement.device,
            do_classifier_free_guidance=False,
            clip_skip=way if isinstance(way, int) else None,
        )
        if way == ZEROS:
            text, pooled = text.new_zeros(text.shape), pooled.new_zeros(pooled.shape)
        return per_text(text=text, pooled=pooled)

    def _first_latents(self, state: State) -> None:
        from saggar.engine.models import common

        params, text = state.params, state.conditioning["cond"]["text"]
        for branch, sizes in _sizes(params, state.request.task).items():
            if branch in state.conditioning:
                encoded = state.conditioning[branch]
                state.conditioning[branch] = {**encoded, "sizes": text.new_tensor([sizes])}
        common.set_timesteps(state, self._pipe.scheduler, params.num_inference_steps)
        if state.request.task == "inpaint":
            self._begin(state, text.dtype)
            return
        factor = self._pipe.vae_scale_factor
        size = params.height // factor, params.width // factor
        state.latents = common.first_noise(state, self._pipe.unet.config.in_channels, *size, like=text)

    def _begin(self, state: State, dtype: torch.dtype) -> None:
        state.latents, state.extras["noise"], *origin = self.begin(
            state,
            self._pipe.vae.config.latent_channels,
            dtype,
            is_strength_max=state.params.strength == 1.0,
            return_noise=True,
            return_image_latents=not self._painter,
        )
        if origin:
            (state.extras["origin"],) = origin
        self._upcast()  # encoding has undone it

    def _guidance_embedding(self, rows: Rows, like: torch.Tensor) -> torch.Tensor:
        from saggar.engine.models import common

        strengths = common.floats([row.state.params.guidance_scale - 1 for row in rows], like)
        size = self._pipe.unet.config.time_cond_proj_dim
        embedding: torch.Tensor = self._pipe.get_guidance_scale_embedding(strengths.cpu(), embedding_dim=size)
        return embedding.to(like)


def _sizes(params: SDXLParams, task: str) -> dict[str, tuple[int, ...]]:
    """For each branch the original size, the crop's corner and the target size."""
    own = (params.height, params.width)
    corner, size, shown = params.crops_coords_top_left, params.original_size or own, params.target_size or own
    cond = size + corner + shown
    original, target = params.negative_original_size, params.negative_target_size
    if task == "inpaint":  # its pipeline has another rule
        return {"cond": cond, "uncond": (original or size) + corner + (target or shown)}
    if original is None or target is None:
        return {"cond": cond, "uncond": cond}
    return {"cond": cond, "uncond": original + params.negative_crops_coords_top_left + target}
