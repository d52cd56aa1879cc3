"""Wan 2.1 and 2.2: text, or a first picture with it, to video; with one transformer, or two that share the time.

Rows may differ in text, timestep, guidance, pictures and number of steps; they share height, width, frames and the
length to which texts are filled up. In Wan 2.2 a second transformer takes over below a border in time, with guidance of
its own: requests on both sides run in one batch, in forwards of their own. Each request has its own sampler with its
history; its shift of time is that of the checkpoint's scheduler. Latents [outputs, channels, frames, h, w] stay in
float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from saggar.engine.cache.prompt import Encoded
from saggar.engine.errors import LoadError
from saggar.engine.media import Counts
from saggar.engine.models.base import branched
from saggar.engine.models.from_image import over
from saggar.engine.models.registry import serves
from saggar.engine.models.source.checkpoint import Checkpoint
from saggar.engine.models.state import RequestState, Row
from saggar.engine.models.torch_family import per_text
from saggar.engine.models.video import VideoFamily
from saggar.engine.models.wan_config import WanConfig, WanParams
from saggar.engine.parallel.plans import SequencePlan
from saggar.engine.params import Narrowing
from saggar.engine.request import Request

if TYPE_CHECKING:
    import torch
    from saggar.engine.platform.base import Placement
State = RequestState["torch.Tensor", WanParams, Any]
Rows = Sequence[Row["torch.Tensor", WanParams, Any]]


@serves("WanPipeline", "WanImageToVideoPipeline")
class Wan(VideoFamily[WanParams]):
    """See the module. A checkpoint with a timestep for each token (2.2, 5B) makes videos with and without a picture."""

    name = "wan"
    pipeline = "WanImageToVideoPipeline"
    Params = WanParams
    tasks: tuple[str, ...] = ("t2v", "i2v")
    sequence_plan = SequencePlan({"blocks.*.attn1": ("image",), "blocks.*.attn2": ()}, theirs=True)
    batch_fields = ("height", "width", "num_frames", "max_sequence_length")

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Its tasks are its pipeline's, or both where tokens have timesteps of their own."""
        self._config = WanConfig(checkpoint)
        super().__init__(checkpoint)
        if not self._config.expands:
            self.tasks = ("i2v",) if checkpoint.class_name == self.pipeline else ("t2v",)

    def inputs_of(self, task: str) -> Counts:
        """A picture to begin with. One to end with too: where the transformer has places for both, always; where it
        sees pictures by their latents alone, if there is one.
        """
        if task != "i2v":
            return {}
        if self._config.reads_both:
            return {"image": (2, 2)}
        return {"image": (1, 1 if self._config.expands or self._config.reads_pictures else 2)}

    def fits_inputs(self, task: str) -> bool:
        """Pictures of any size are brought to that of the video."""
        return True

    def frame_factor(self) -> int:
        """Of the autoencoder."""
        return self._config.frame_factor

    def narrowing(self) -> Narrowing:
        """Grids and largest sizes; one transformer has one guidance."""
        return self._config.narrowing()

    def cost(self, request: Request) -> int:
        """Tokens of the video, of each row and branch."""
        params = WanParams(**request.params)  # type: ignore[arg-type]
        return request.rows * len(_branches(params)) * self._config.tokens(self._latent_shape(params))

    def load(self, placement: Placement) -> None:
        """LoadError: a transformer of those that its border in time needs is not there."""
        needed = ["transformer"] if self._config.border is None else ["transformer", "transformer_2"]
        for name in needed:
            if self.checkpoint.components.get(name) is None:
                raise LoadError(f"{self.checkpoint.folder}: {name} is missing, which boundary_ratio asks for")
        super().load(placement)
        # That for pictures reads no text without the package ftfy.
        self._reader = over(self._pipe, "WanPipeline")

    def prepare_encode(self, states: Sequence[State]) -> None:
        """UMT5 for all texts of one length at once; pictures, noise and sampler for each request."""
        from saggar.engine.models import common
        from saggar.engine.models.wan_picture import see

        self.condition_each(states, self._encode, lambda state, _: state.params.max_sequence_length)
        for state in states:
            common.set_timesteps(state, self._pipe.scheduler, state.params.num_inference_steps)
            shape = (self._pipe.vae.config.z_dim, *self._latent_shape(state.params))
            like = state.conditioning["cond"]["text"].float()
            state.latents = common.first_noise(state, *shape, like=like)
            if state.request.task == "i2v":
                state.extras = see(self._pipe, state, self._placement.device)

    def branches(self, state: State) -> tuple[str, ...]:
        """A second forward for guidance above 1, in both transformers."""
        return _branches(state.params)

    def step_key(self, state: State) -> str:
        """The transformer whose time it is."""
        if self._config.border is None:
            return "transformer"
        border = self._config.border * self._pipe.scheduler.config.num_train_timesteps
        return "transformer" if state.timesteps[state.step_index] >= border else "transformer_2"

    def predict(self, rows: Rows, branch: str) -> torch.Tensor:
        """Velocity [rows, channels, frames, h, w] of rows whose time is that of one transformer."""
        from saggar.engine.models import common
        from saggar.engine.models.wan_picture import pictured, token_timesteps

        transformer = getattr(self._pipe, self.step_key(rows[0].state))
        latents = pictured(rows, self._config.expands)
        timesteps = common.pack_timesteps(rows, latents)
        if self._config.expands:
            timesteps = token_timesteps(rows, timesteps)
        pictures = [row.state.extras["image"] for row in rows if "image" in row.state.extras]
        velocity: torch.Tensor = transformer(
            hidden_states=latents.to(transformer.dtype),
            timestep=timesteps,
            encoder_hidden_states=common.pack(rows, branch, "text").to(transformer.dtype),
            encoder_hidden_states_image=common.join(pictures).to(transformer.dtype) if pictures else None,
            return_dict=False,
        )[0]
        return velocity

    def combine(self, predictions: Mapping[str, torch.Tensor], state: State) -> torch.Tensor:
        """With the guidance of the transformer whose time it is."""
        from saggar.engine.models import common

        scale, second = state.params.guidance_scale, state.params.guidance_scale_2
        if second is not None and self.step_key(state) == "transformer_2":
            scale = second
        return common.guided(predictions, scale)

    def images(self, state: State) -> torch.Tensor:
        """In the autoencoder's dtype, the first frame's given latents in their place."""
        from saggar.engine.models.wan_picture import with_picture

        assert state.latents is not None
        latents = with_picture(state.latents, state) if self._config.expands else state.latents
        return latents.to(self._pipe.vae.dtype)

    def unscale(self, latents: torch.Tensor) -> torch.Tensor:
        """Each channel has its own scale."""
        config = self._pipe.vae.config
        mean, std = (
            latents.new_tensor(values).view(1, -1, 1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )
        return latents / (1.0 / std) + mean

    def _encode(self, texts: list[str], length: int) -> Sequence[Encoded]:
        text, _ = self._reader.encode_prompt(
            texts,
            do_classifier_free_guidance=False,
            max_sequence_length=length,
            device=self._placement.device,
        )
        return per_text(text=text)

    def _latent_shape(self, params: WanParams) -> tuple[int, int, int]:
        """Frames, height and width."""
        factor = self._config.factor
        return self.latent_frames(params), params.height // factor, params.width // factor


def _branches(params: WanParams) -> tuple[str, ...]:
    return branched(params.guidance_scale > 1)
