"""What FLUX, Qwen-Image, Ovis-Image and LongCat-Image share: latents packed in cells of 2×2,
[outputs, tokens, channels × 4], and rows of one size, because the transformer takes one set of positions for all of
them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from saggar.engine.models.state import RequestState
from saggar.engine.models.torch_family import TorchFamily, text_length, vae_factor
from saggar.engine.params import Narrowing
from saggar.engine.request import Request

if TYPE_CHECKING:
    import torch
DEFAULT_LATENT = 128
"""The pipelines' default size in latent pixels, whatever the checkpoint."""
LARGEST_LATENT = 512
CELL = 2
"""Latent pixels of a token, along one side."""


class PackedParams(Protocol):
    """The parameters that the pipelines have in common."""

    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...


K = TypeVar("K", bound=PackedParams)


class PackedFamily(TorchFamily[K]):
    """`tokenizer` is the component that bounds a text's length, `longest_text` what the pipeline takes at most, in
    tokens.
    """

    tokenizer: ClassVar[str] = "tokenizer"
    longest_text: ClassVar[int] = 512
    batch_fields: ClassVar[tuple[str, ...]] = ("height", "width", "max_sequence_length")

    @abstractmethod
    def branches_of(self, params: K, request: Request) -> tuple[str, ...]:
        """The branches that a request needs, in every step."""

    def narrowing(self) -> Narrowing:
        """The grid is one cell; the text is no longer than the tokenizer was made for."""
        factor = vae_factor(self.checkpoint.config("vae"))
        size = {
            "default": DEFAULT_LATENT * factor,
            "minimum": CELL * factor,
            "maximum": LARGEST_LATENT * factor,
            "multipleOf": CELL * factor,
        }
        words = {"height": size, "width": size}
        if hasattr(self.Params, "max_sequence_length"):
            usual = self.Params.max_sequence_length
            text = text_length(self.checkpoint, self.tokenizer, usual, self.longest_text)
            words["max_sequence_length"] = text
        return words

    def cost(self, request: Request) -> int:
        """Tokens of the image, of its references, and as many of the text as are allowed, of each row and branch."""
        params: K = self.params_of(request)
        high, wide = _cells(params, vae_factor(self.checkpoint.config("vae")))
        text = getattr(params, "max_sequence_length", self.longest_text)
        tokens = high * wide + self.reference_tokens(request) + text
        return request.rows * len(self.branches_of(params, request)) * tokens

    def reference_tokens(self, request: Request) -> int:
        """Hook: of the pictures that stand behind the latents in each forward."""
        return 0

    def branches(self, state: RequestState[torch.Tensor, K, Any]) -> tuple[str, ...]:
        """The same in every step."""
        return self.branches_of(state.params, state.request)

    def images(self, state: RequestState[torch.Tensor, K, Any]) -> torch.Tensor:
        """Packed latents [n, h·w, c·4] to [n, c, 2h, 2w]."""
        assert state.latents is not None
        return self.unpack(state.latents, state.params)

    def unpack(self, latents: torch.Tensor, params: K) -> torch.Tensor:
        """As `images`, of latents of these parameters."""
        from saggar.engine.models import common

        return common.unpack_cells(latents, *self.cells(params))

    def cells(self, params: K) -> tuple[int, int]:
        """The image's height and width in tokens."""
        return _cells(params, self._pipe.vae_scale_factor)

    def draw_latents(self, state: RequestState[torch.Tensor, K, Any]) -> Any:
        """The pipeline's own first latents, with what it returns beside them, in the dtype of the encoded text."""
        from saggar.engine.models import common

        state.generators = common.generators(state.request)
        return self._pipe.prepare_latents(
            state.request.num_outputs,
            self._pipe.transformer.config.in_channels // CELL**2,
            state.params.height,
            state.params.width,
            state.conditioning["cond"]["text"].dtype,
            self._placement.device,
            state.generators,
        )


def _cells(params: PackedParams, factor: int) -> tuple[int, int]:
    return params.height // (CELL * factor), params.width // (CELL * factor)
