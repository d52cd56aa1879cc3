"""LongCat-Image, and its Edit of a reference picture: classifier-free guidance above 1, with an empty negative prompt
where none is given, kept from growing longer than the unguided prediction where asked.

Texts are always filled up to 512 tokens. The encoder may first write the prompt anew, one text at a time, for it would
write otherwise beside others; those that it has written are cached with their encoding. Rows of an edit share the size
of their reference, which is the picture's too, and follows from that of the input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

from pydantic import Field
from pydantic.dataclasses import dataclass
from saggar.engine.cache.prompt import Encoded
from saggar.engine.errors import InvalidRequest
from saggar.engine.media import Counts
from saggar.engine.models import references
from saggar.engine.models.joint import JointFamily
from saggar.engine.models.packed import CELL
from saggar.engine.models.registry import serves
from saggar.engine.models.state import RequestState
from saggar.engine.models.torch_family import per_text, vae_factor
from saggar.engine.params import Narrowing
from saggar.engine.request import Request, TextCut

if TYPE_CHECKING:
    import torch
TEXT = 512
ROUND = 16
"""The pipeline rounds the sides of a reference up to so many pixels."""


@dataclass(frozen=True)
class LongCatImageParams:
    """Defaults as in LongCatImagePipeline.__call__; height and width are the checkpoint's."""

    height: Annotated[int, Field(ge=1, le=8192)] = 1024
    width: Annotated[int, Field(ge=1, le=8192)] = 1024
    num_inference_steps: Annotated[int, Field(ge=1, le=1000)] = 50
    guidance_scale: Annotated[float, Field(ge=0, le=100)] = 4.5
    enable_cfg_renorm: bool = True
    cfg_renorm_min: Annotated[float, Field(ge=0, le=1)] = 0.0
    enable_prompt_rewrite: bool = True


@dataclass(frozen=True)
class LongCatImageEditParams:
    """Defaults as in LongCatImageEditPipeline.__call__.

    The picture has the reference's ratio and about `reference_pixels`: fewer cost less; the pipeline knows only the
    default.
    """

    num_inference_steps: Annotated[int, Field(ge=1, le=1000)] = 50
    guidance_scale: Annotated[float, Field(ge=0, le=100)] = 4.5
    reference_pixels: Annotated[int, Field(ge=ROUND**2, le=1 << 24)] = references.AREA


@dataclass(frozen=True)
class SizedEditParams(LongCatImageEditParams):
    """With the size that follows from the reference's."""

    height: int = 0
    width: int = 0


State: TypeAlias = "RequestState[torch.Tensor, Any, Any]"


class LongCat(JointFamily[Any]):
    """What both do."""

    longest_text = TEXT
    loaded_as: ClassVar[Mapping[str, str]] = {
        "text_processor": "saggar.engine.models.source.qwen_processor:PictureProcessor"
    }

    def tokens_of(self, text: str) -> int:
        """As the pipeline splits it: what stands in quotes by characters."""
        from diffusers.pipelines.longcat_image.pipeline_longcat_image import split_quotation

        pieces: list[str] = []
        for part, quoted in split_quotation(text):
            pieces += part if quoted else [part]
        return sum(
            len(self._pipe.tokenizer(piece, add_special_tokens=False)["input_ids"]) for piece in pieces
        )

    def cut_of(self, text: str) -> TextCut | None:
        """A token is a byte or more, so that few texts need to be counted."""
        tokens = self.tokens_of(text) if len(text.encode()) > TEXT else 0
        return TextCut(TEXT, tokens) if tokens > TEXT else None

    def images(self, state: State) -> torch.Tensor:
        """In the VAE's dtype."""
        return super().images(state).to(self._pipe.vae.dtype)


@serves("LongCatImagePipeline")
class LongCatImage(LongCat):
    """Of a prompt."""

    name = "longcat-image"
    pipeline = "LongCatImagePipeline"
    Params = LongCatImageParams
    batch_fields = ("height", "width")

    def prepare_encode(self, states: Sequence[State]) -> None:
        """Qwen2.5-VL for all texts at once; noise and sampler for each request."""
        self.condition_each(
            states,
            self._encode,
            lambda state, branch: branch == "cond" and state.params.enable_prompt_rewrite,
        )
        for state in states:
            self.schedule(state)
            state.latents, state.extras["image_ids"] = self.draw_latents(state)
            state.extras["text_ids"] = state.conditioning["cond"]["ids"]

    def _encode(self, texts: list[str], rewrite: bool) -> Sequence[Encoded]:
        if rewrite:
            texts = [self._pipe.rewire_prompt(text, self._placement.device)[0] for text in texts]
        embeds, ids = self._pipe.encode_prompt(texts)
        return [{**one, "ids": ids} for one in per_text(text=embeds)]

    def cuts(self, texts: Sequence[str], how: bool) -> Sequence[TextCut | None]:
        """None of those that are written anew: who does that reads all."""
        return [None if how else self.cut_of(text) for text in texts]

    def combine(self, predictions: Mapping[str, torch.Tensor], state: State) -> torch.Tensor:
        """Guidance where the request has it; each token is no longer than its conditional prediction, if asked."""
        guided, params = super().combine(predictions, state), state.params
        if "uncond" not in predictions or not params.enable_cfg_renorm:
            return guided
        length, limit = (one.norm(dim=-1, keepdim=True) for one in (guided, predictions["cond"]))
        scale: torch.Tensor = (limit / (length + 1e-8)).clamp(min=params.cfg_renorm_min, max=1.0)
        return guided * scale


@serves("LongCatImageEditPipeline")
class LongCatImageEdit(LongCat):
    """Of a reference picture, which the encoder of the text sees too, half as large."""

    name = "longcat-image-edit"
    pipeline = "LongCatImageEditPipeline"
    Params = LongCatImageEditParams
    tasks = ("edit",)
    inputs: ClassVar[Mapping[str, Counts]] = {"edit": {"image": (1, 1)}}
    batch_fields = ("reference_pixels",)

    def narrowing(self) -> Narrowing:
        """Nothing: the size is no parameter."""
        return {}

    def params_of(self, request: Request) -> SizedEditParams:
        """With the size, rounded up as the pipeline does."""
        ((height, width),) = references.sizes(request)
        wide = math.sqrt(int(str(request.params["reference_pixels"])) * (width * 1.0 / height))
        high = wide / (width * 1.0 / height)
        sides = {name: math.ceil(side / ROUND) * ROUND for name, side in (("height", high), ("width", wide))}
        params: Any = {**request.params, **sides}
        return SizedEditParams(**params)

    def reference_tokens(self, request: Request) -> int:
        """As many as the picture's."""
        cell, params = CELL * vae_factor(self.checkpoint.config("vae")), self.params_of(request)
        return (params.height // cell) * (params.width // cell)

    def prepare_encode(self, states: Sequence[State]) -> None:
        """Qwen2.5-VL for each text with its picture; noise, reference and sampler for each request."""
        resize = self._pipe.image_processor.resize
        whole, seen = {}, {}
        for state in states:
            self._refuse_long(state)
            high, wide = state.params.height, state.params.width
            whole[state.id] = resize(references.pictures(state.request)[0], high, wide)
            seen[state.id] = references.Seen.of([resize(whole[state.id], high // 2, wide // 2)])
        self.condition_each(states, self._encode, lambda state, _: seen[state.id])
        for state in states:
            self.schedule(state)
            self._first_latents(state, whole[state.id])

    def _refuse_long(self, state: State) -> None:
        """InvalidRequest: the pipeline fails where it would cut (it asks for the length of a length)."""
        for branch in self.branches(state):
            cut = self.cut_of(self.text_of(state, branch))
            if cut is not None:
                raise InvalidRequest(
                    self.field_of(branch), f"{cut.tokens} tokens are too many", f"at most {TEXT} tokens"
                )

    def _encode(self, texts: list[str], seen: references.Seen) -> Sequence[Encoded]:
        encoded = [self._pipe.encode_prompt([text], image=seen.pictures[0]) for text in texts]
        return [{"text": embeds, "ids": ids} for embeds, ids in encoded]

    def _first_latents(self, state: State, picture: Any) -> None:
        import torch
        from saggar.engine.models import common

        params, pipe, text = state.params, self._pipe, state.conditioning["cond"]["text"]
        state.generators = common.generators(state.request)
        state.latents, latents, ids, places = pipe.prepare_latents(
            pipe.image_processor.preprocess(picture, params.height, params.width),
            state.request.num_outputs,
            pipe.transformer.config.in_channels // CELL**2,
            params.height,
            params.width,
            text.dtype,
            text.shape[1],
            self._placement.device,
            state.generators,
        )
        state.extras["references"] = latents[:1]
        state.extras["image_ids"] = torch.cat([ids, places])
        state.extras["text_ids"] = state.conditioning["cond"]["ids"]
