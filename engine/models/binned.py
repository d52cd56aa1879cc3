"""What PixArt and Sana share: a masked text, a learned variance that is dropped, and resolution binning.

With binning a picture is drawn at the size of a table that has the nearest aspect ratio, then resized and cropped to
the size that was asked for; the table hangs on the size the denoiser was made for. Rows share the size they ask for,
not only the bin: which size that is takes diffusers to know, and a batch key must be known without.
"""

from __future__ import annotations

import importlib
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from saggar.engine.models.base import branched
from saggar.engine.models.state import RequestState
from saggar.engine.models.torch_family import DrawnParams, TorchFamily, text_length
from saggar.engine.params import Narrowing
from saggar.engine.request import Request

if TYPE_CHECKING:
    import torch


class BinnedParams(DrawnParams, Protocol):
    """The parameters that the pipelines have in common."""

    @property
    def guidance_scale(self) -> float: ...
    @property
    def eta(self) -> float: ...
    @property
    def use_resolution_binning(self) -> bool: ...


B = TypeVar("B", bound=BinnedParams)


class BinnedFamily(TorchFamily[B]):
    """`bins` names for each `sample_size` of the denoiser its table, by pixels a side; `grid` is what the pipeline
    takes no finer sizes than, `usual_text` the usual length of a text in tokens.
    """

    bins: ClassVar[Mapping[int, int]]
    grid: ClassVar[int]
    usual_text: ClassVar[int]
    largest_latent: ClassVar[int]
    default_size: ClassVar[int | None] = None
    """For pipelines whose default does not follow from the checkpoint."""
    batch_fields = ("height", "width", "max_sequence_length", "use_resolution_binning")

    @abstractmethod
    def factor(self) -> int:
        """Pixels a latent pixel, along one side."""

    def narrowing(self) -> Narrowing:
        """The grid follows from VAE, patch and pipeline. A denoiser of a size that has no table has no binning."""
        cell = self._cell()
        size = {
            "default": self.default_size or self._sample_size() * self.factor(),
            "minimum": math.lcm(self.grid, cell),
            "maximum": self.largest_latent * self.factor(),
            "multipleOf": math.lcm(self.grid, cell),
        }
        words: dict[str, Any] = {"height": size, "width": size}
        if self._sample_size() not in self.bins:
            words["use_resolution_binning"] = {"default": False, "enum": [False]}
        return {**words, "max_sequence_length": text_length(self.checkpoint, "tokenizer", self.usual_text)}

    def cost(self, request: Request) -> int:
        """Image tokens of each row and branch; the sizes of one table have about as many."""
        params: B = self._build_params(request.params)
        binned = self.bins[self._sample_size()] if params.use_resolution_binning else 0
        pixels = binned**2 or params.height * params.width
        return request.rows * len(_branches(params)) * (pixels // self._cell() ** 2)

    def branches(self, state: RequestState[torch.Tensor, B, Any]) -> tuple[str, ...]:
        """A second forward for guidance above 1."""
        return _branches(state.params)

    def combine(
        self, predictions: Mapping[str, torch.Tensor], state: RequestState[torch.Tensor, B, Any]
    ) -> torch.Tensor:
        """Guidance where the request has it; of a learned variance the sampler knows nothing."""
        from saggar.engine.models import common

        noise = common.guided(predictions, state.params.guidance_scale)
        config = self._pipe.transformer.config
        return noise.chunk(2, dim=1)[0] if config.out_channels // 2 == config.in_channels else noise

    def step_scheduler(self, state: RequestState[torch.Tensor, B, Any], noise: torch.Tensor) -> None:
        """The request's own sampler; eta is for those that know it."""
        from saggar.engine.models import common

        common.step(state, noise, eta=state.params.eta)

    def unscale(self, latents: torch.Tensor) -> torch.Tensor:
        """The pipelines do not shift."""
        vae = self._pipe.vae
        scaled: torch.Tensor = latents.to(vae.dtype) / vae.config.scaling_factor
        return scaled

    def finish(self, pictures: torch.Tensor, params: B) -> torch.Tensor:
        """Back to the size that was asked for."""
        if not params.use_resolution_binning:
            return pictures
        resize = self._pipe.image_processor.resize_and_crop_tensor
        resized: torch.Tensor = resize(pictures, params.width, params.height)
        return resized

    def first_latents(self, state: RequestState[torch.Tensor, B, Any], like: torch.Tensor) -> None:
        """Sampler, timesteps and noise of a request, in the dtype and on the device of `like`."""
        from saggar.engine.models import common

        common.set_timesteps(state, self._pipe.scheduler, state.params.num_inference_steps)
        factor = self._pipe.vae_scale_factor
        size = [pixels // factor for pixels in self._drawn_size(state.params)]
        state.latents = common.first_noise(state, self._pipe.transformer.config.in_channels, *size, like=like)

    def _drawn_size(self, params: B) -> Sequence[int]:
        if not params.use_resolution_binning:
            return params.height, params.width
        tables = importlib.import_module(type(self._pipe).__module__)
        table = getattr(tables, f"ASPECT_RATIO_{self.bins[self._sample_size()]}_BIN")
        size: Sequence[int] = self._pipe.image_processor.classify_height_width_bin(
            params.height, params.width, ratios=table
        )
        return size

    def _cell(self) -> int:
        return self.factor() * int(str(self.checkpoint.config("transformer")["patch_size"]))

    def _sample_size(self) -> int:
        return int(str(self.checkpoint.config("transformer")["sample_size"]))


def _branches(params: BinnedParams) -> tuple[str, ...]:
    return branched(params.guidance_scale > 1)
