"""Qwen-Image-Layered: a picture with transparency, taken apart into layers; an output is all of its layers, in order.

Rows share the number of layers, and the picture's size, which follows from that of the input. They may also differ in
the text's limit. Where the prompt is empty, the encoder first describes the picture, one at a time; descriptions are
cached with their encoding. Latents have the whole picture before its layers: [outputs, (1 + layers) × tokens, ...].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from saggar.engine.cache.prompt import Encoded
from saggar.engine.media import Counts
from saggar.engine.models import references
from saggar.engine.models.packed import CELL
from saggar.engine.models.qwen import LONGEST_TEXT, Cells, QwenFamily
from saggar.engine.models.registry import serves
from saggar.engine.models.state import RequestState
from saggar.engine.models.torch_family import vae_factor
from saggar.engine.params import Narrowing
from saggar.engine.request import Request, TextCut

if TYPE_CHECKING:
    import torch
ROUND = 32
RESOLUTIONS = [640, 1024]
"""The pipeline takes no others."""
UNSAID = ("", " ")
"""Prompts for which the encoder describes the picture."""
BASE_TOKENS = 256
"""The sampler's shift is the root of the picture's tokens over so many."""


@dataclass(frozen=True)
class LayeredParams:
    """Defaults as in QwenImageLayeredPipeline.__call__.

    The picture has the input's ratio and about `resolution` squared pixels. `cfg_normalize` keeps each token of a
    guided prediction as long as it is without. `use_en_prompt`: a description is asked for in English.
    """

    layers: Annotated[int, Field(ge=1, le=16)] = 4
    num_inference_steps: Annotated[int, Field(ge=1, le=1000)] = 50
    true_cfg_scale: Annotated[float, Field(ge=0, le=100)] = 4.0
    max_sequence_length: Annotated[int, Field(ge=1, le=LONGEST_TEXT)] = 512
    resolution: Annotated[int, Field(ge=ROUND, le=2048)] = 640
    cfg_normalize: bool = False
    use_en_prompt: bool = False


@dataclass(frozen=True)
class SizedLayeredParams(LayeredParams):
    """With the size that follows from the input's."""

    height: int = 0
    width: int = 0


State: TypeAlias = "RequestState[torch.Tensor, SizedLayeredParams, Any]"
Way: TypeAlias = "tuple[int, references.Seen | None, bool]"
"""How a text is encoded: its limit, the picture that is described in its place if it is empty, whether in English."""


@serves("QwenImageLayeredPipeline")
class QwenImageLayered(QwenFamily[SizedLayeredParams]):
    """See the module."""

    name = "qwen-image-layered"
    pipeline = "QwenImageLayeredPipeline"
    Params = LayeredParams
    tasks = ("layers",)
    inputs: ClassVar[Mapping[str, Counts]] = {"layers": {"image": (1, 1)}}
    alpha = frozenset({"layers"})
    batch_fields = ("layers", "resolution")
    loaded_as: ClassVar[Mapping[str, str]] = {
        "processor": "saggar.engine.models.source.qwen_processor:PictureProcessor"
    }

    def narrowing(self) -> Narrowing:
        """The size is no parameter."""
        words = {name: own for name, own in super().narrowing().items() if name not in ("height", "width")}
        return {**words, "resolution": {"enum": [*RESOLUTIONS]}}

    def params_of(self, request: Request) -> SizedLayeredParams:
        """With the size of the picture."""
        (size,) = references.sizes(request)
        height, width = references.of_area(*size, int(str(request.params["resolution"])) ** 2, ROUND)
        cell = CELL * vae_factor(self.checkpoint.config("vae"))
        params: Any = {
            **request.params,
            "height": max(height // cell, 1) * cell,
            "width": max(width // cell, 1) * cell,
        }
        return SizedLayeredParams(**params)

    def media_per_output(self, request: Request) -> int:
        """Its layers."""
        return self.params_of(request).layers

    def reference_tokens(self, request: Request) -> int:
        """Of the input and of the layers, beside those of the whole picture."""
        cell, params = CELL * vae_factor(self.checkpoint.config("vae")), self.params_of(request)
        return (params.layers + 1) * (params.height // cell) * (params.width // cell)

    def shapes(self, state: State) -> list[Cells]:
        """The whole picture, its layers, and the input."""
        return super().shapes(state) * (state.params.layers + 2)

    def more_inputs(self, latents: torch.Tensor) -> dict[str, Any]:
        """That the input is no opaque picture."""
        import torch

        return {"additional_t_cond": latents.new_zeros(len(latents), dtype=torch.long)}

    def prepare_encode(self, states: Sequence[State]) -> None:
        """Qwen2.5-VL for all texts of one limit at once; noise, input and sampler for each request."""
        pictures = {state.id: self._picture(state) for state in states}

        def way(state: State, branch: str) -> Way:
            params = state.params
            unsaid = branch == "cond" and state.request.prompt in UNSAID
            seen = references.Seen.of([pictures[state.id]]) if unsaid else None
            return params.max_sequence_length, seen, unsaid and params.use_en_prompt

        self.condition_each(states, self._encode, way)
        for state in states:
            self._first_latents(state, pictures[state.id])

    def _picture(self, state: State) -> Any:
        from PIL import Image

        pixels: Any = state.request.inputs["image"][0]
        picture = Image.fromarray(pixels).convert("RGBA")
        return self._pipe.image_processor.resize(picture, state.params.height, state.params.width)

    def _encode(self, texts: list[str], way: Way) -> Sequence[Encoded]:
        length, seen, english = way
        device = self._placement.device
        if seen is not None:
            described = self._pipe.get_image_caption(seen.pictures[0], use_en_prompt=english, device=device)
            texts = [described for _ in texts]
        embeds, mask = self._pipe.encode_prompt(texts, device=device, max_sequence_length=length)
        lengths = [embeds.shape[1]] * len(texts) if mask is None else mask.sum(1).tolist()
        return [{"text": embeds[i : i + 1, :tokens]} for i, tokens in enumerate(lengths)]

    def kept(self, how: Way) -> int:
        """As many as the limit says, behind the template's beginning."""
        return how[0] + int(self._pipe.prompt_template_encode_start_idx)

    def cuts(self, texts: Sequence[str], how: Way) -> Sequence[TextCut | None]:
        """None where a description stands in a text's place."""
        return super().cuts(texts, how) if how[1] is None else [None] * len(texts)

    def _first_latents(self, state: State, picture: Any) -> None:
        from saggar.engine.models import common

        params, pipe = state.params, self._pipe
        image = pipe.image_processor.preprocess(picture, params.height, params.width).unsqueeze(2)
        state.generators = common.generators(state.request)
        state.latents, latents = pipe.prepare_latents(
            image.to(pipe.text_encoder.dtype),
            state.request.num_outputs,
            pipe.transformer.config.in_channels // CELL**2,
            params.height,
            params.width,
            params.layers,
            state.conditioning["cond"]["text"].dtype,
            self._placement.device,
            state.generators,
        )
        state.extras["references"] = latents[:1]
        common.set_timesteps(
            state,
            pipe.scheduler,
            params.num_inference_steps,
            sigmas=np.linspace(1.0, 0, params.num_inference_steps + 1)[:-1],
            mu=(latents.shape[1] / BASE_TOKENS) ** 0.5,
        )

    def combine(self, predictions: Mapping[str, torch.Tensor], state: State) -> torch.Tensor:
        """True guidance where the request has it, rescaled where it asks for that."""
        from saggar.engine.models import common

        if state.params.cfg_normalize:
            return super().combine(predictions, state)
        return common.guided(predictions, state.params.true_cfg_scale)

    def images(self, state: State) -> torch.Tensor:
        """The layers of all outputs, [outputs × layers, c, h, w]: the whole picture is not among them."""
        assert state.latents is not None
        params = state.params
        whole = self._pipe._unpack_latents(
            state.latents, params.height, params.width, params.layers, self._pipe.vae_scale_factor
        )
        layers: torch.Tensor = whole[:, :, 1:].transpose(1, 2).flatten(0, 1)
        return layers.to(self._pipe.vae.dtype)
