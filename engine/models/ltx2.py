"""LTX-2: videos with their sound, of a text, or of a text and their first picture.

Up to four forwards a step, each with its weight for the video and for the sound: the prompt's, the negative prompt's,
one with attention left out in some blocks, and one where video and sound do not hear of each other. Rows may differ in
text, timestep, guidance, speed of motion and decoding. They share sizes, frames and frame rate, which together are the
length of the sound. Latents are one tensor, [outputs, video tokens × channels + sound tokens × channels], in float32
whatever the model's dtype. This module knows nothing of predicted durations and rewritten prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from saggar.engine.cache.prompt import Encoded
from saggar.engine.errors import InvalidRequest
from saggar.engine.media import Clip, Medium
from saggar.engine.models.ltx2_decode import clip, tokens, video_of
from saggar.engine.models.ltx2_params import Geometry, LTX2Params, Shape, branches_of, guided, scales_of
from saggar.engine.models.registry import serves
from saggar.engine.models.source.checkpoint import Checkpoint
from saggar.engine.models.state import RequestState, Row
from saggar.engine.models.torch_family import Text, TorchFamily, per_text
from saggar.engine.models.video import strip
from saggar.engine.parallel.plans import Gather, SequencePlan, Split
from saggar.engine.params import Narrowing
from saggar.engine.request import Request

if TYPE_CHECKING:
    import torch
    from saggar.engine.platform.base import Placement

State = RequestState["torch.Tensor", LTX2Params, Any]
Rows = Sequence[Row["torch.Tensor", LTX2Params, Any]]


@serves("LTX2Pipeline", "LTX2ImageToVideoPipeline")
class LTX2(TorchFamily[LTX2Params]):
    """See the module."""

    name = "ltx2"
    pipeline = "LTX2Pipeline"
    Params = LTX2Params
    tasks = ("t2v", "i2v")
    inputs: ClassVar = {"i2v": {"image": (1, 1)}}
    medium: ClassVar[Medium] = "video"
    sequence_plan = SequencePlan(
        {
            "transformer_blocks.*.attn1": ("video",),
            "transformer_blocks.*.attn2": (),
            "transformer_blocks.*.audio_attn1": (),
            "transformer_blocks.*.audio_attn2": (),
            "transformer_blocks.*.audio_to_video_attn": (),
            "transformer_blocks.*.video_to_audio_attn": (),
        },
        splits={
            "": {"hidden_states": Split(1, stream="video"), "timestep": Split(1, dims=2)},
            "rope": {0: Split(-2), 1: Split(-2)},
            "transformer_blocks.*.audio_to_video_attn": {"query_rotary_emb": Split(-2)},
        },
        gathers={"proj_out": Gather(1, "video")},
        wholes={"transformer_blocks.*.video_to_audio_attn": {"encoder_hidden_states": Gather(1, "video")}},
    )
    masks: ClassVar = {"cross": "any"}
    batch_fields = (
        "height",
        "width",
        "num_frames",
        "frame_rate",
        "spatio_temporal_guidance_blocks",
        "use_cross_timestep",
        "max_sequence_length",
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._geometry = Geometry(checkpoint)
        super().__init__(checkpoint)

    def narrowing(self) -> Narrowing:
        """Grids of sizes and texts, and the blocks that there are."""
        return self._geometry.narrowing()

    def preprocess(self, request: Request) -> Request:
        """InvalidRequest: too few frames for a sound."""
        params = self._build_params(request.params)
        if self._shape(params).sound < 1:
            raise InvalidRequest(
                "params.frame_rate", "leaves no time for a sound", "a lower one, or more frames"
            )
        return request

    def cost(self, request: Request) -> int:
        """Tokens of video, sound and text of each row and branch."""
        params = LTX2Params(**request.params)  # type: ignore[arg-type]
        shape = self._shape(params)
        tokens = shape.video + shape.sound + params.max_sequence_length
        return request.rows * len(branches_of(params)) * tokens

    def fits_inputs(self, task: str) -> bool:
        """A picture is brought to the size of the video."""
        return True

    def load(self, placement: Placement) -> None:
        """The parts, and the pipeline for pictures over the same ones."""
        from diffusers import LTX2ImageToVideoPipeline

        super().load(placement)
        self._of_picture: Any = LTX2ImageToVideoPipeline(**self._pipe.components)

    def prepare_encode(self, states: Sequence[State]) -> None:
        """Gemma and connectors for all texts at once; noise, sampler and positions for each request."""
        self.condition_each(states, self._encode, lambda state, _: state.params.max_sequence_length)
        for state in states:
            self._first_latents(state)

    def branches(self, state: State) -> tuple[str, ...]:
        """Those whose scale asks for them."""
        return branches_of(state.params)

    def field_of(self, branch: str) -> Text:
        """All but one are of the prompt."""
        return "negative_prompt" if branch == "uncond" else "prompt"

    def predict(self, rows: Rows, branch: str) -> torch.Tensor:
        """Velocities, one behind the other as latents are, [rows, numbers] in float32."""
        import torch
        from saggar.engine.models import common

        params, shape = rows[0].state.params, self._shape(rows[0].state.params)
        latents = common.pack_latents(rows)
        times = common.pack_timesteps(rows, latents)
        kind = rows[0].cond(branch, "video").dtype
        video, sound = (part.to(kind) for part in tokens(latents, shape))
        of_video = times
        if rows[0].state.request.inputs:  # tokens of the first picture are without noise
            noisy = torch.arange(shape.video, device=times.device) >= shape.first_picture
            of_video = times[:, None] * noisy
        masked = "mask" in rows[0].state.conditioning[branch]
        mask = common.pack(rows, branch, "mask") if masked else None
        both = self._pipe.transformer(
            hidden_states=video,
            audio_hidden_states=sound,
            encoder_hidden_states=common.pack(rows, branch, "video"),
            audio_encoder_hidden_states=common.pack(rows, branch, "sound"),
            timestep=of_video,
            audio_timestep=times,
            sigma=times,
            encoder_attention_mask=mask,
            audio_encoder_attention_mask=mask,
            video_coords=torch.cat([row.state.extras["coords"] for row in rows]),
            audio_num_frames=shape.sound,
            isolate_modalities=branch == "alone",
            spatio_temporal_guidance_blocks=[*params.spatio_temporal_guidance_blocks]
            if branch == "stg"
            else None,
            use_cross_timestep=params.use_cross_timestep,
            return_dict=False,
        )
        return torch.cat([part.float().flatten(1) for part in both], dim=1)

    def combine(self, predictions: Mapping[str, torch.Tensor], state: State) -> torch.Tensor:
        """Guidance between pictures, not velocities, for video and sound each by itself."""
        import torch

        assert state.latents is not None
        sampler: Any = state.sampler
        sigma = sampler.sigmas[state.step_index]
        sizes = self._shape(state.params).numbers
        found = {branch: state.latents - velocity * sigma for branch, velocity in predictions.items()}
        parts = [
            guided(
                {branch: torch.split(value, [*sizes], dim=1)[place] for branch, value in found.items()},
                scales,
            )
            for place, scales in enumerate(scales_of(state.params))
        ]
        velocity: torch.Tensor = (state.latents - torch.cat(parts, dim=1)) / sigma
        return velocity

    def step_scheduler(self, state: State, noise: torch.Tensor) -> None:
        """One sampler for both, which have the same timesteps; a first picture stays as it is."""
        from saggar.engine.models import common

        before = state.latents
        common.step(state, noise)
        if state.request.inputs:
            assert before is not None and state.latents is not None
            shape = self._shape(state.params)
            kept = shape.first_picture * shape.channels[0]
            state.latents[:, :kept] = before[:, :kept]

    def post_decode(self, states: Sequence[State]) -> list[list[Clip]]:
        """One output after the other: the memory of a decoded video is many times that of its latents."""
        return [self._clips(state) for state in states]

    def preview(self, state: State) -> np.ndarray:
        """Of the first output."""
        assert state.latents is not None
        return strip(video_of(self._pipe, state.latents[:1], self._shape(state.params))[0])

    def _clips(self, state: State) -> list[Clip]:
        assert state.latents is not None
        noise, shape, pixels = state.extras.get("noise"), self._shape(state.params), self._placement.pixels
        return [
            clip(
                self._pipe,
                state.latents[index : index + 1],
                shape,
                state.params,
                None if noise is None else noise[index : index + 1],
                pixels,
            )
            for index in range(state.request.num_outputs)
        ]

    def _encode(self, texts: list[str], length: int) -> Sequence[Encoded]:
        pipe = self._pipe
        hidden, mask, _, _ = pipe.encode_prompt(
            texts,
            do_classifier_free_guidance=False,
            max_sequence_length=length,
            device=self._placement.device,
        )
        video, sound, mask = pipe.connectors(hidden, mask, padding_side=pipe.tokenizer.padding_side)
        # Where registers stand in for what a text is short of, no token is masked.
        masked = {} if pipe.connectors.video_connector.learnable_registers is not None else {"mask": mask}
        return per_text(video=video, sound=sound, **masked)

    def _first_latents(self, state: State) -> None:
        import torch
        from diffusers.pipelines.ltx2.utils import conditioning_frame_rate
        from diffusers.utils.torch_utils import randn_tensor
        from saggar.engine.models import common

        pipe, params, shape = self._pipe, state.params, self._shape(state.params)
        device, steps, count = self._placement.device, params.num_inference_steps, state.request.num_outputs
        state.generators = common.generators(state.request)
        size = (pipe.transformer.config.in_channels, params.height, params.width, params.num_frames, 0.0)
        where = (torch.float32, device, state.generators)
        if state.request.inputs:
            video, _ = self._of_picture.prepare_latents(self._picture(state), count, *size, *where)
        else:
            video = pipe.prepare_latents(count, *size, *where)
        config = pipe.audio_vae.config
        sound = pipe.prepare_audio_latents(
            count, config.latent_channels, shape.sound, config.mel_bins, 0.0, *where
        )
        state.latents = torch.cat([video.flatten(1), sound.flatten(1)], dim=1)
        state.extras["coords"] = pipe.transformer.rope.prepare_video_coords(
            1, *shape[:3], device, fps=conditioning_frame_rate(params.frame_rate, params.motion_speed)
        )
        if pipe.vae.config.timestep_conditioning:  # drawn here, so that decoding can be tried again
            state.extras["noise"] = randn_tensor(
                (count, shape.channels[0], *shape[:3]), state.generators, device, self._placement.dtype
            )
        common.set_timesteps(
            state,
            pipe.scheduler,
            steps,
            sigmas=np.linspace(1.0, 1 / steps, steps),
            mu=common.calculate_shift(video.shape[1], pipe.scheduler.config),
        )

    def _picture(self, state: State) -> torch.Tensor:
        """The first picture for each output, [outputs, 3, H, W] in -1..1."""
        from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf, resolve_default_image_crf
        from PIL import Image
        from saggar.engine.models import common

        pipe, params = self._of_picture, state.params
        crf = resolve_default_image_crf(pipe.text_encoder) if params.image_crf is None else params.image_crf
        given = common.picture(state.request.inputs["image"][0])
        packed = Image.fromarray(apply_image_conditioning_crf(np.array(given), crf))
        ready: torch.Tensor = pipe.video_processor.preprocess(packed, params.height, params.width)
        return ready.to(self._placement.device, pipe.vae.dtype).expand(state.request.num_outputs, -1, -1, -1)

    def _shape(self, params: LTX2Params) -> Shape:
        return self._geometry.shape(params)
