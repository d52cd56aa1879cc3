"""Qwen-Image-Edit, of one reference picture or (Plus, such as 2509) of several: the encoder of the text sees them too.

Rows share the sizes of their references, which follow from those of the inputs. A text is encoded with its pictures, so
that the cache of encoded prompts tells pictures apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from saggar.engine.cache.prompt import Encoded
from saggar.engine.errors import InvalidRequest
from saggar.engine.media import Counts
from saggar.engine.models import references
from saggar.engine.models.packed import CELL
from saggar.engine.models.qwen import Cells, QwenFamily
from saggar.engine.models.registry import serves
from saggar.engine.models.state import RequestState
from saggar.engine.models.torch_family import vae_factor
from saggar.engine.params import or_null
from saggar.engine.request import Request

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
ROUND = 32
"""The pipelines round the sides of references to so many pixels."""
SEEN = 384 * 384 / references.AREA
"""Plus shows the encoder smaller ones: pixels for each pixel that the VAE is shown."""


@dataclass(frozen=True)
class QwenImageEditParams:
    """Defaults as in each pipeline's __call__.

    Sides that are null follow from the last reference's ratio. References are brought to `reference_pixels`: fewer cost
    less and show less; the pipelines know only the default.
    """

    height: Annotated[int, Field(ge=1, le=8192, json_schema_extra=or_null(edit=None))] = 1024
    width: Annotated[int, Field(ge=1, le=8192, json_schema_extra=or_null(edit=None))] = 1024
    num_inference_steps: Annotated[int, Field(ge=1, le=1000)] = 50
    true_cfg_scale: Annotated[float, Field(ge=0, le=100)] = 4.0
    reference_pixels: Annotated[int, Field(ge=ROUND**2, le=1 << 24)] = references.AREA


State = RequestState["torch.Tensor", QwenImageEditParams, Any]
Size = tuple[int, int]


@serves("QwenImageEditPipeline")
class QwenImageEdit(QwenFamily[QwenImageEditParams]):
    """Of one reference."""

    name = "qwen-image-edit"
    pipeline = "QwenImageEditPipeline"
    Params = QwenImageEditParams
    tasks = ("edit",)
    inputs: ClassVar[Mapping[str, Counts]] = {"edit": {"image": (1, 1)}}
    batch_fields = ("height", "width", "reference_pixels")
    loaded_as: ClassVar[Mapping[str, str]] = {
        "processor": "saggar.engine.models.source.qwen_processor:PictureProcessor"
    }

    def preprocess(self, request: Request) -> Request:
        """InvalidRequest: a reference of which nothing would be left."""
        for index, size in enumerate(self.seen_sizes(request)):
            if min(size) < ROUND:
                raise InvalidRequest(
                    f"inputs.image[{index}]", "is too long and narrow", "a side at most 30 times the other"
                )
        return request

    def params_of(self, request: Request) -> QwenImageEditParams:
        """Sides that are null have the last reference's ratio."""
        usual = self.reference_sizes(request)[-1]
        cell = CELL * vae_factor(self.checkpoint.config("vae"))
        sides = zip(("height", "width"), usual, strict=True)
        missing = {
            name: max(side // cell * cell, cell) for name, side in sides if request.params[name] is None
        }
        return self._build_params({**request.params, **missing})

    def reference_sizes(self, request: Request) -> list[Size]:
        """Height and width of each, as the VAE is shown it."""
        return self._sizes(request, 1.0)

    def seen_sizes(self, request: Request) -> list[Size]:
        """The same, as the text's encoder is shown it."""
        return self.reference_sizes(request)

    def _sizes(self, request: Request, share: float) -> list[Size]:
        area = share * int(str(request.params["reference_pixels"]))
        return [references.of_area(*size, area, ROUND) for size in references.sizes(request)]

    def reference_tokens(self, request: Request) -> int:
        """Of all of them."""
        cell = CELL * vae_factor(self.checkpoint.config("vae"))
        return sum(high // cell * (wide // cell) for high, wide in self.reference_sizes(request))

    def shapes(self, state: State) -> list[Cells]:
        """The picture, and each reference."""
        cell = CELL * self._pipe.vae_scale_factor
        sizes = self.reference_sizes(state.request)
        return [*super().shapes(state), *((1, high // cell, wide // cell) for high, wide in sizes)]

    def prepare_encode(self, states: Sequence[State]) -> None:
        """Qwen2.5-VL for each text with its pictures; noise, references, sampler for each request."""
        seen = {state.id: self._seen(state.request) for state in states}
        self.condition_each(states, self._encode, lambda state, _: seen[state.id])
        for state in states:
            self.schedule(state)
            self._first_latents(state)

    def _seen(self, request: Request) -> references.Seen:
        resize = self._pipe.image_processor.resize
        sizes = self.seen_sizes(request)
        pictures = [resize(one, *size) for one, size in zip(references.pictures(request), sizes, strict=True)]
        return references.Seen.of(pictures)

    def _encode(self, texts: list[str], seen: references.Seen) -> Sequence[Encoded]:
        # One at a time: the processor would want pictures for each.
        encoded = [
            self._pipe.encode_prompt(text, image=self.shown(seen.pictures), device=self._placement.device)[0]
            for text in texts
        ]
        return [{"text": embeds} for embeds in encoded]

    def shown(self, pictures: Sequence[Image]) -> Any:
        """As `encode_prompt` takes them."""
        return pictures[0]

    def encoded(self, images: list[torch.Tensor]) -> Any:
        """As `prepare_latents` takes them."""
        return images[0]

    def _first_latents(self, state: State) -> None:
        from saggar.engine.models import common

        request, params, pipe = state.request, state.params, self._pipe
        images = [
            pipe.image_processor.preprocess(self.brought(picture, size), *size).unsqueeze(2)
            for picture, size in zip(references.pictures(request), self.reference_sizes(request), strict=True)
        ]
        state.generators = common.generators(request)
        state.latents, latents = pipe.prepare_latents(
            self.encoded(images),
            request.num_outputs,
            pipe.transformer.config.in_channels // CELL**2,
            params.height,
            params.width,
            state.conditioning["cond"]["text"].dtype,
            self._placement.device,
            state.generators,
        )
        state.extras["references"] = latents[:1]

    def brought(self, picture: Image, size: Size) -> Any:
        """What the pipeline does before `preprocess`."""
        return self._pipe.image_processor.resize(picture, *size)


@serves("QwenImageEditPlusPipeline")
class QwenImageEditPlus(QwenImageEdit):
    """Of several references."""

    name = "qwen-image-edit-plus"
    pipeline = "QwenImageEditPlusPipeline"
    inputs: ClassVar[Mapping[str, Counts]] = {"edit": {"image": (1, references.MOST)}}

    def seen_sizes(self, request: Request) -> list[Size]:
        """Smaller ones."""
        return self._sizes(request, SEEN)

    def shown(self, pictures: Sequence[Image]) -> Any:
        """All of them."""
        return list(pictures)

    def encoded(self, images: list[torch.Tensor]) -> Any:
        """All of them."""
        return images

    def brought(self, picture: Image, size: Size) -> Any:
        """Nothing."""
        return picture
