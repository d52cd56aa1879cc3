"""Sana: Gemma with an instruction before the prompt, linear attention, a deep-compression autoencoder.

Classifier-free guidance above 1, with an empty negative prompt where none is given; that one has no instruction. Rows
may differ in text and its length, instruction, timestep, guidance, cleaning of captions and eta; they share height,
width, resolution binning, and the length to which texts are padded. Each request has its own sampler with its history;
latents [outputs, channels, h, w] stay in float32. It does not know Sprint's distilled guidance.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass
from saggar.engine.cache.prompt import Encoded
from saggar.engine.errors import InvalidRequest
from saggar.engine.models.binned import BinnedFamily
from saggar.engine.models.registry import serves
from saggar.engine.models.state import RequestState, Row
from saggar.engine.models.torch_family import per_text
from saggar.engine.parallel.plans import Gather, SequencePlan, Split
from saggar.engine.request import Request

if TYPE_CHECKING:
    import torch
    from saggar.engine.platform.base import Placement

INSTRUCTION = "complex_human_instruction"


@dataclass(frozen=True)
class SanaParams:
    """Defaults as in SanaPipeline.__call__.

    `complex_human_instruction` null is the pipeline's own instruction, an empty list is none. `clean_caption` needs
    beautifulsoup4 and ftfy; without them texts are only put in lower case, as diffusers does.
    """

    height: Annotated[int, Field(ge=1, le=8192)] = 1024
    width: Annotated[int, Field(ge=1, le=8192)] = 1024
    num_inference_steps: Annotated[int, Field(ge=1, le=1000)] = 20
    guidance_scale: Annotated[float, Field(ge=0, le=100)] = 4.5
    eta: Annotated[float, Field(ge=0, le=1)] = 0.0
    clean_caption: bool = False
    use_resolution_binning: bool = True
    max_sequence_length: Annotated[int, Field(ge=1, le=512)] = 300
    complex_human_instruction: tuple[str, ...] | None = None


class Way(NamedTuple):
    """What the encoding of a text depends on besides the text."""

    length: int
    clean: bool
    instruction: tuple[str, ...]


State = RequestState["torch.Tensor", SanaParams, Any]
Rows = Sequence[Row["torch.Tensor", SanaParams, Any]]


@serves("SanaPipeline")
class Sana(BinnedFamily[SanaParams]):
    """See the module."""

    name = "sana"
    pipeline = "SanaPipeline"
    Params = SanaParams
    bins: ClassVar[Mapping[int, int]] = {16: 512, 32: 1024, 64: 2048, 128: 4096}
    sequence_plan = SequencePlan(
        {"transformer_blocks.*.attn2": ()},
        splits={
            "transformer_blocks.0": {"hidden_states": Split(1, stream="image", unit="width")},
            "transformer_blocks.*": {"height": Split(0)},
        },
        gathers={"proj_out": Gather(1)},
        convolutions={
            f"transformer_blocks.*.ff.conv_{name}": "image" for name in ("inverted", "depth", "point")
        },
    )
    masks: ClassVar = {"cross": "any"}
    grid = 32
    usual_text = SanaParams.max_sequence_length
    largest_latent = 256
    default_size = SanaParams.height

    def factor(self) -> int:
        """From the stages of the autoencoder."""
        stages = self.checkpoint.config("vae")["encoder_block_out_channels"]
        assert isinstance(stages, list)
        return int(2 ** (len(stages) - 1))

    def preprocess(self, request: Request) -> Request:
        """An instruction is no longer than a prompt may be."""
        length = sum(map(len, self._build_params(request.params).complex_human_instruction or ()))
        if length > (longest := self.limits["max_prompt_chars"]):
            raise InvalidRequest(
                f"params.{INSTRUCTION}", f"{length} characters are too many", f"at most {longest} characters"
            )
        return request

    def load(self, placement: Placement) -> None:
        """The parts, and the instruction as the installed pipeline has it."""
        super().load(placement)
        call = inspect.signature(type(self._pipe).__call__)
        self._instruction = tuple(call.parameters[INSTRUCTION].default)

    def prepare_encode(self, states: Sequence[State]) -> None:
        """Gemma for the texts of one instruction at once; noise and sampler for each request."""
        self.condition_each(states, self._encode, self._way)
        for state in states:
            self.first_latents(state, like=state.conditioning["cond"]["text"].float())

    def predict(self, rows: Rows, branch: str) -> torch.Tensor:
        """Velocity [rows, channels, h, w] in float32."""
        from saggar.engine.models import common

        transformer, latents = self._pipe.transformer, common.pack_latents(rows)
        velocity: torch.Tensor = transformer(
            latents.to(transformer.dtype),
            encoder_hidden_states=common.pack(rows, branch, "text").to(transformer.dtype),
            encoder_attention_mask=common.pack(rows, branch, "mask"),
            timestep=common.pack_timesteps(rows, latents) * transformer.config.timestep_scale,
            return_dict=False,
        )[0]
        return velocity.float()

    def _way(self, state: State, branch: str) -> Way:
        params, own = state.params, state.params.complex_human_instruction
        instruction = self._instruction if own is None else own
        return Way(params.max_sequence_length, params.clean_caption, instruction if branch == "cond" else ())

    def _encode(self, texts: list[str], way: Way) -> Sequence[Encoded]:
        text, mask, _, _ = self._pipe.encode_prompt(
            texts,
            do_classifier_free_guidance=False,
            device=self._placement.device,
            clean_caption=way.clean,
            max_sequence_length=way.length,
            complex_human_instruction=list(way.instruction),
        )
        return per_text(text=text, mask=mask)
