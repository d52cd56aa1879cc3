"""Stable Audio Open: T5 and two times in seconds, a sampler that draws noise in each step, sounds of one length.

Classifier-free guidance above 1; without a negative prompt its branch has zeros for text and times. The model makes as
much sound as it can at once, and what lies between the two times is cut out of it. So rows may differ in everything:
text, times, timestep, guidance. Each request has its own sampler with its history and its own Brownian tree for each
output. Latents have shape [outputs, channels, length].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from pydantic import Field
from pydantic.dataclasses import dataclass
from saggar.engine.cache.prompt import Encoded
from saggar.engine.errors import InvalidRequest
from saggar.engine.media import Medium, Sound
from saggar.engine.models.base import Family, branched
from saggar.engine.models.registry import serves
from saggar.engine.models.state import RequestState, Row
from saggar.engine.models.torch_family import TorchFamily, per_text
from saggar.engine.parallel.plans import Gather, SequencePlan, Split
from saggar.engine.params import Narrowing
from saggar.engine.request import JsonValue, Request

if TYPE_CHECKING:
    import torch
    from saggar.engine.platform.base import Placement

ZEROS = "zeros"
AGAIN = "a2a"
"""The task that starts from a sound."""


@dataclass(frozen=True)
class StableAudioParams:
    """Defaults as in StableAudioPipeline.__call__. `audio_end_in_s` null is the end of what the model can make."""

    audio_end_in_s: Annotated[float, Field(ge=0, le=86400)] | None = None
    audio_start_in_s: Annotated[float, Field(ge=0, le=86400)] = 0.0
    num_inference_steps: Annotated[int, Field(ge=1, le=1000)] = 100
    guidance_scale: Annotated[float, Field(ge=0, le=100)] = 7.0
    eta: Annotated[float, Field(ge=0, le=1)] = 0.0


State = RequestState["torch.Tensor", StableAudioParams, Any]
Rows = Sequence[Row["torch.Tensor", StableAudioParams, Any]]


@serves("StableAudioPipeline")
class StableAudio(TorchFamily[StableAudioParams]):
    """See the module."""

    name = "stable-audio"
    pipeline = "StableAudioPipeline"
    Params = StableAudioParams
    tasks = ("t2a", AGAIN)
    inputs: ClassVar = {AGAIN: {"audio": (1, 1)}}
    medium: ClassVar[Medium] = "audio"
    batch_fields = ()
    sequence_plan = SequencePlan(
        {"transformer_blocks.*.attn1": ("sound",), "transformer_blocks.*.attn2": ()},
        splits={
            "transformer_blocks.0": {"hidden_states": Split(1, stream="sound")},
            "transformer_blocks.*": {"rotary_embedding": Split(0)},
        },
        gathers={"proj_out": Gather(1, "sound")},
    )
    preview = Family.preview

    def narrowing(self) -> Narrowing:
        """The projection of times has a largest and a smallest one."""
        config = self.checkpoint.config("projection_model")
        low, high = (float(str(config[name])) for name in ("min_value", "max_value"))
        time: dict[str, JsonValue] = {"type": "number", "minimum": max(low, 0.0), "maximum": high}
        return {
            "audio_start_in_s": {**time, "default": max(low, 0.0)},
            "audio_end_in_s": {"anyOf": [time, {"type": "null"}]},
        }

    def preprocess(self, request: Request) -> Request:
        """InvalidRequest: the times hold no sound, or more than the model makes at once; a sound of another rate."""
        params, rate, longest = self._build_params(request.params), self._rate(), self._longest()
        start, end = params.audio_start_in_s, _end(params, longest)
        samples = int(min(end, longest) * rate) - int(start * rate)
        if samples < 1 or end - start > longest:
            raise InvalidRequest(
                "params.audio_end_in_s",
                f"{end:g} does not go with a start at {start:g}",
                f"after the start, by at most {longest:g} seconds, and both inside a sound of that length",
            )
        for index, sound in enumerate(request.inputs.get("audio", ())):
            if not isinstance(sound, Sound) or sound.rate != rate or sound.samples.shape[1] > 2:
                raise InvalidRequest(
                    f"inputs.audio[{index}]", "does not fit the model", f"one or two channels, {rate} Hz"
                )
        return request

    def cost(self, request: Request) -> int:
        """Latents of each row and branch, and one token for times and timestep."""
        branches = _branches(StableAudioParams(**request.params))  # type: ignore[arg-type]
        return request.rows * len(branches) * (self._length() + 1)

    def fits_inputs(self, task: str) -> bool:
        """A sound is cut or filled up."""
        return True

    def load(self, placement: Placement) -> None:
        """The parts, and the table of positions, which is the same for all."""
        from diffusers.models.embeddings import get_1d_rotary_pos_embed

        super().load(placement)
        table = get_1d_rotary_pos_embed(
            self._pipe.rotary_embed_dim, self._length() + 1, use_real=True, repeat_interleave_real=False
        )
        self._positions = tuple(part.to(placement.device) for part in table)

    def prepare_encode(self, states: Sequence[State]) -> None:
        """T5 for all texts at once; times, sampler and first latents for each request."""
        self.condition_each(states, self._encode, self._way)
        for state in states:
            self._add_times(state)
            self._first_latents(state)

    def branches(self, state: State) -> tuple[str, ...]:
        """A second forward for guidance above 1."""
        return _branches(state.params)

    def predict(self, rows: Rows, branch: str) -> torch.Tensor:
        """What the sampler wants predicted, [rows, channels, length]."""
        from saggar.engine.models import common

        latents = common.pack_scaled_latents(rows)
        predicted: torch.Tensor = self._pipe.transformer(
            latents,
            common.pack_timesteps(rows, latents),
            encoder_hidden_states=common.pack(rows, branch, "text"),
            global_hidden_states=common.pack(rows, branch, "times"),
            rotary_embedding=self._positions,
            return_dict=False,
        )[0]
        return predicted

    def combine(self, predictions: Mapping[str, torch.Tensor], state: State) -> torch.Tensor:
        """Guidance where the request has it."""
        from saggar.engine.models import common

        return common.guided(predictions, state.params.guidance_scale)

    def step_scheduler(self, state: State, noise: torch.Tensor) -> None:
        """The request's own sampler; eta is for those that know it."""
        from saggar.engine.models import common

        common.step(state, noise, eta=state.params.eta)

    def post_decode(self, states: Sequence[State]) -> list[list[Sound]]:
        """All at once; of each request what lies between its times."""
        from saggar.engine.models import common

        waves = self._pipe.vae.decode(
            common.join([cast("torch.Tensor", state.latents) for state in states])
        ).sample
        rate, longest = self._rate(), self._longest()
        sounds: list[list[Sound]] = []
        for state, whole in zip(
            states, waves.split([state.request.num_outputs for state in states]), strict=True
        ):
            params = state.params
            cut = whole[..., int(params.audio_start_in_s * rate) : int(_end(params, longest) * rate)]
            samples = (
                common.require_finite(cut).float().clamp(-1, 1).transpose(1, 2).cpu().contiguous().numpy()
            )
            sounds.append([Sound(one, rate) for one in samples])
        return sounds

    def _way(self, state: State, branch: str) -> str:
        return ZEROS if branch != "cond" and state.request.negative_prompt is None else ""

    def _encode(self, texts: list[str], way: str) -> Sequence[Encoded]:
        text = self._pipe.encode_prompt(texts, self._placement.device, False)
        return per_text(text=text.new_zeros(text.shape) if way == ZEROS else text)

    def _add_times(self, state: State) -> None:
        import torch

        params = state.params
        start, end = self._pipe.encode_duration(
            params.audio_start_in_s, _end(params, self._longest()), self._placement.device, False, 1
        )
        times = torch.cat([start, end], dim=2)
        for branch, encoded in state.conditioning.items():
            keep = 0.0 if self._way(state, branch) == ZEROS else 1.0
            text = torch.cat([encoded["text"], start * keep, end * keep], dim=1)
            state.conditioning[branch] = {"text": text, "times": times}

    def _first_latents(self, state: State) -> None:
        """Each output by itself, for it draws what a sound to start from needs after its noise."""
        import torch
        from diffusers.schedulers.scheduling_dpmsolver_sde import BrownianTreeNoiseSampler
        from saggar.engine.models import common

        pipe, text = self._pipe, state.conditioning["cond"]["text"]
        common.set_timesteps(state, pipe.scheduler, state.params.num_inference_steps)
        state.generators = common.generators(state.request)
        channels, sounding = pipe.transformer.config.in_channels, pipe.vae.config.audio_channels
        given = [cast(Sound, one).samples for one in state.request.inputs.get("audio", ())]
        wave = torch.from_numpy(given[0].T[None]).to(text) if given else None
        state.latents = torch.cat(
            [
                pipe.prepare_latents(
                    1, channels, self._length(), text.dtype, text.device, generator, None, wave, 1, sounding
                )
                for generator in state.generators
            ]
        )
        sampler: Any = state.sampler
        if hasattr(sampler, "noise_sampler"):
            # As the sampler would make it, but on the CPU: noise depends on no device.
            sampler.noise_sampler = BrownianTreeNoiseSampler(
                torch.zeros_like(state.latents, device="cpu"),
                sigma_min=sampler.config.sigma_min,
                sigma_max=sampler.config.sigma_max,
                seed=[generator.initial_seed() for generator in state.generators],
            )

    def _length(self) -> int:
        return int(str(self.checkpoint.config("transformer")["sample_size"]))

    def _rate(self) -> int:
        return int(str(self.checkpoint.config("vae")["sampling_rate"]))

    def _longest(self) -> float:
        """Seconds."""
        hop = 1
        for ratio in cast("list[int]", self.checkpoint.config("vae")["downsampling_ratios"]):
            hop *= ratio
        return self._length() * hop / self._rate()


def _branches(params: StableAudioParams) -> tuple[str, ...]:
    return branched(params.guidance_scale > 1)


def _end(params: StableAudioParams, longest: float) -> float:
    return longest if params.audio_end_in_s is None else params.audio_end_in_s
