"""What families of videos share: a number of frames that the autoencoder can make, clips, and previews as a strip.

Latents are [outputs, channels, frames, h, w] where a family's `images` gives them; the first latent frame is one frame
of the video, each other one as many as the autoencoder's factor in time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np
from saggar.engine.errors import InvalidRequest
from saggar.engine.media import Clip, Medium
from saggar.engine.models.state import RequestState
from saggar.engine.models.torch_family import TorchFamily
from saggar.engine.request import JsonValue, Request

if TYPE_CHECKING:
    import torch

STRIP = 4
"""Frames of a preview, side by side; fewer where there are not as many."""
NARROWEST = 16
"""A picture's long side, as a multiple of the short one."""


def frames_grid(factor: int) -> dict[str, JsonValue]:
    """Schema words of a number of frames: one, and for each further latent frame `factor` more. The pipelines round
    what does not fit, with a warning; here it is refused.
    """
    return {"multipleOf": factor, "x-offset": 1} if factor > 1 else {}


class VideoParams(Protocol):
    """The parameters that the families have in common; `fps` is only written into the clip."""

    @property
    def num_frames(self) -> int: ...
    @property
    def fps(self) -> float: ...


K = TypeVar("K", bound=VideoParams)


class VideoFamily(TorchFamily[K]):
    """Each output is a Clip without sound."""

    medium: ClassVar[Medium] = "video"
    tasks: tuple[str, ...] = ("t2v",)

    @abstractmethod
    def frame_factor(self) -> int:
        """Frames of a latent frame, from the configuration alone."""

    def preprocess(self, request: Request) -> Request:
        """InvalidRequest: pictures that are too narrow. An encoder that brings the short side to its size would make a
        wall of one.
        """
        for index, one in enumerate(request.inputs.get("image", ())):
            assert isinstance(one, np.ndarray)
            sides = one.shape[:2]
            if max(sides) > NARROWEST * min(sides):
                high, wide = sides
                raise InvalidRequest(
                    f"inputs.image[{index}]",
                    f"{high}x{wide} is too narrow",
                    f"sides of 1 to {NARROWEST} at most",
                )
        return request

    def latent_frames(self, params: K) -> int:
        """Latent frames of a video."""
        return (params.num_frames - 1) // self.frame_factor() + 1

    def post_decode(self, states: Sequence[RequestState[torch.Tensor, K, Any]]) -> list[list[Clip]]:
        """One output after the other: the memory of a decoded video is many times that of its latents."""
        return [self._clips(state) for state in states]

    def _clips(self, state: RequestState[torch.Tensor, K, Any]) -> list[Clip]:
        from saggar.engine.models.common import pixel_array

        clips = []
        latents = self.images(state)
        for index in range(len(latents)):
            video = self.decode(self.unscale(latents[index : index + 1]))
            frames = pixel_array(video[0].transpose(0, 1), self._placement.pixels)
            clips.append(Clip(frames, state.params.fps))
        return clips

    def preview(self, state: RequestState[torch.Tensor, K, Any]) -> np.ndarray:
        """Of the first output."""
        return strip(self.images(state)[0])


def strip(latents: torch.Tensor) -> np.ndarray:
    """A preview of latents [channels, frames, h, w]: some frames side by side, [h, STRIP · w, 3], mixtures of the
    channels.
    """
    from saggar.engine.models.common import rgb_preview

    length = latents.shape[1]
    chosen = np.linspace(0, length - 1, min(STRIP, length)).round().astype(int).tolist()
    return rgb_preview(latents[:, chosen].transpose(1, 2).flatten(2))
