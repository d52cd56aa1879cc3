"""What goes into a model beside text, and what comes out of it: pictures, videos, sounds. No torch.

A picture is a plain array: uint8 H×W×3, H×W×4 with alpha, or a mask H×W; float32 in 0..1 where the engine is
configured so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np

Medium: TypeAlias = Literal["image", "video", "audio"]
"""What a model makes."""
Kind: TypeAlias = Literal["image", "mask", "audio", "video"]
"""What a model may be given, by the names that a job's inputs have."""


@dataclass(frozen=True)
class Sound:
    """`samples`: float32 [samples, channels] in -1..1; `rate` in Hz."""

    samples: np.ndarray
    rate: int

    @property
    def seconds(self) -> float:
        """How long it is."""
        return len(self.samples) / self.rate


@dataclass(frozen=True)
class Clip:
    """`frames`: uint8 [frames, H, W, 3], or float32 in 0..1; `fps` of them a second; with sound if it has some."""

    frames: np.ndarray
    fps: float
    sound: Sound | None = None

    @property
    def seconds(self) -> float:
        """How long it is."""
        return len(self.frames) / self.fps


Media: TypeAlias = "np.ndarray | Clip | Sound"
Counts: TypeAlias = "dict[str, tuple[int, int]]"
"""For a kind of input the least and the most of them that a task takes."""
