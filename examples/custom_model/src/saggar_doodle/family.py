"""Doodle: a flow model with a transformer of its own, a small text encoder, and a VAE of diffusers.

Rows may differ in text and its length, steps, guidance and seed; they share height and width. Latents have shape
[outputs, channels, h, w]. model_index.json names, beside the VAE, the files of everything else:
{"_class_name": "DoodlePipeline", "vae": ["diffusers", "AutoencoderKL"], "config": "doodle.json",
"tokenizer": "tokenizer.model", "weights": {"blocks": ..., "ends": ..., "text": ...}, "shift": 1.5}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from saggar.engine.plugin import (
    Encoded,
    LoadError,
    Narrowing,
    Placement,
    Request,
    RequestState,
    Row,
    TextCut,
    TorchFamily,
    serves,
    vae_factor,
)

if TYPE_CHECKING:
    import torch

    from saggar_doodle.model import Config, Denoiser, TextEncoder
    from saggar_doodle.tokens import Tokenizer


@dataclass(frozen=True)
class DoodleParams:
    """`guidance` above 1 costs a second forward; where there is no negative prompt it leads away from the empty one."""

    height: Annotated[int, Field(ge=1, le=4096)] = 64
    width: Annotated[int, Field(ge=1, le=4096)] = 64
    steps: Annotated[int, Field(ge=1, le=1000)] = 12
    guidance: Annotated[float, Field(ge=0, le=100)] = 3.0


State = RequestState["torch.Tensor", DoodleParams, Any]
Rows = Sequence[Row["torch.Tensor", DoodleParams, Any]]


@plain_dataclass
class Parts:
    """What a rank holds; `components` is what ranks of one group compare themselves by."""

    vae: Any
    text: TextEncoder
    denoiser: Denoiser
    tokenizer: Tokenizer

    @property
    def components(self) -> dict[str, Any]:
        """By name."""
        return vars(self)


@serves("DoodlePipeline")
class Doodle(TorchFamily[DoodleParams]):
    """The sampler of a request is the row of its noise levels, one more than it has steps."""

    name = "doodle"
    Params = DoodleParams
    batch_fields = ("height", "width")
    _pipe: Parts

    # -- without weights, and without torch

    @cached_property
    def config(self) -> Mapping[str, int]:
        """doodle.json."""
        try:
            return TypeAdapter(dict[str, int]).validate_python(
                self.checkpoint.read(self.checkpoint.index.get("config"))
            )
        except ValidationError as error:
            raise LoadError(
                f"{self.checkpoint.folder}: the configuration is not one of whole numbers"
            ) from error

    def narrowing(self) -> Narrowing:
        """The grid is one patch."""
        return {"height": {"minimum": self._cell(), "multipleOf": self._cell()}} | {
            "width": {"minimum": self._cell(), "multipleOf": self._cell()}
        }

    def cost(self, request: Request) -> int:
        """Image tokens of each row and branch."""
        params = DoodleParams(**request.params)  # type: ignore[arg-type]
        return request.rows * len(_branches(params)) * (params.height * params.width // self._cell() ** 2)

    def _cell(self) -> int:
        return vae_factor(self.checkpoint.config("vae")) * self.config["patch"]

    # -- in a rank

    def load(self, placement: Placement) -> None:
        """The VAE by diffusers; all else from the files that model_index.json names, straight to the device."""
        from saggar.engine.plugin_torch import load_component, load_own

        from saggar_doodle import model, names
        from saggar_doodle.tokens import Tokenizer

        try:
            config: Config = model.Config(**self.config)
        except TypeError as error:
            raise LoadError(
                f"{self.checkpoint.folder}: its configuration is of another version: {error}"
            ) from error
        weights = self.checkpoint.index.get("weights")
        if not isinstance(weights, dict):
            raise LoadError(f"{self.checkpoint.folder}/model_index.json: weights is missing")
        blocks, ends, text = (self.checkpoint.file(weights.get(name)) for name in ("blocks", "ends", "text"))
        transformer = {blocks: names.renaming(names.BLOCKS), ends: names.renaming(names.ENDS)}
        parts = Parts(
            vae=load_component(self.checkpoint, "vae", placement),
            text=load_own(lambda: model.TextEncoder(config), {text: names.renaming(names.TEXT)}, placement),
            denoiser=load_own(lambda: model.Denoiser(config), transformer, placement),
            tokenizer=Tokenizer(self.checkpoint.file(self.checkpoint.index.get("tokenizer")), config.longest),
        )
        self.keep(parts, placement)

    def prepare_encode(self, states: Sequence[State]) -> None:
        """Texts one by one, for each has its own length; noise levels and noise for each request."""
        self.condition(states, lambda texts: [self._encoded_text(text) for text in texts])
        for state in states:
            self._first_latents(state)

    def cuts(self, texts: Sequence[str], how: object) -> list[TextCut | None]:
        """Which of these texts are too long: whoever asked for a picture is told so."""
        found = [TextCut(*self._pipe.tokenizer.count(text)) for text in texts]
        return [cut if cut.read_tokens < cut.tokens else None for cut in found]

    def branches(self, state: State) -> tuple[str, ...]:
        """A second forward for guidance above 1."""
        return _branches(state.params)

    def predict(self, rows: Rows, branch: str) -> torch.Tensor:
        """Velocity [rows, channels, h, w]. Texts are filled up to the longest, under a mask."""
        from saggar.engine.plugin_torch import pack_latents, pack_timesteps
        from torch.nn.utils.rnn import pad_sequence

        latents = pack_latents(rows)
        texts = [row.cond(branch, "text")[0] for row in rows]
        mask = pad_sequence([text.new_ones(len(text)) for text in texts], batch_first=True) > 0
        velocity: torch.Tensor = self._pipe.denoiser(
            latents, pack_timesteps(rows, latents), pad_sequence(texts, batch_first=True), mask
        )
        return velocity

    def combine(self, predictions: Mapping[str, torch.Tensor], state: State) -> torch.Tensor:
        """Guidance where the request has it."""
        from saggar.engine.plugin_torch import guide

        if "uncond" not in predictions:
            return predictions["cond"]
        return guide(predictions["cond"], predictions["uncond"], state.params.guidance)

    def step_scheduler(self, state: State, noise: torch.Tensor) -> None:
        """Along the velocity to the next noise level."""
        levels = state.sampler
        assert levels is not None and state.latents is not None
        state.latents = state.latents + (levels[state.step_index + 1] - levels[state.step_index]) * noise

    def unscale(self, latents: torch.Tensor) -> torch.Tensor:
        """Doodle's VAE is scaled and not shifted."""
        scaled: torch.Tensor = latents / self._pipe.vae.config.scaling_factor
        return scaled

    def _encoded_text(self, text: str) -> Encoded:
        import torch

        tokens = torch.tensor([self._pipe.tokenizer(text)["input_ids"]], device=self._placement.device)
        return {"text": self._pipe.text(tokens)}

    def _first_latents(self, state: State) -> None:
        from saggar.engine.plugin_torch import first_noise

        state.sampler = noise_levels(state.params.steps, float(str(self.checkpoint.index.get("shift", 1.0))))
        state.timesteps = state.sampler[:-1]
        factor = vae_factor(self._pipe.vae.config)
        size = (state.params.height // factor, state.params.width // factor)
        state.latents = first_noise(
            state, self.config["channels"], *size, like=state.conditioning["cond"]["text"]
        )


def noise_levels(steps: int, shift: float) -> list[float]:
    """steps + 1 numbers from 1 (noise) to 0 (picture); a larger shift stays longer near the noise."""
    even = [1 - step / steps for step in range(steps + 1)]
    return [shift * level / (1 + (shift - 1) * level) for level in even]


def _branches(params: DoodleParams) -> tuple[str, ...]:
    return ("cond", "uncond") if params.guidance > 1 else ("cond",)
