"""A file of one kind: its header read and checked, its content decoded on demand."""

from __future__ import annotations

from typing import IO, Protocol

from saggar.engine.media import Media
from saggar.workers.inputs.clips import Video
from saggar.workers.inputs.pictures import Picture
from saggar.workers.inputs.policy import Limits
from saggar.workers.inputs.sounds import SoundFile


class Measured(Protocol):
    """`bytes` is the memory that decoding takes at its peak."""

    bytes: int

    def read(self) -> Media:
        """Raises BadInput."""


def measure(kind: str, file: IO[bytes], alpha: bool, limits: Limits) -> Measured:
    """By a job's name for its kind: image, mask, audio, video. Raises BadInput."""
    if kind == "video":
        return Video(file, limits)
    if kind == "audio":
        return SoundFile(file, limits)
    if kind == "mask":
        return Picture(file, limits.pixels, "L")
    return Picture(file, limits.pixels, "RGBA" if alpha else "RGB")
