"""A file of one kind: its header read and checked, its content decoded on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Protocol

from saggar.engine.media import Media
from saggar.workers.inputs.clips import Video
from saggar.workers.inputs.pictures import Picture
from saggar.workers.inputs.policy import Limits
from saggar.workers.inputs.sounds import SoundFile


@dataclass(frozen=True)
class Memory:
    """In bytes: while a file is decoded, and of what is kept of it then."""

    peak: int
    kept: int


def needed(files: Sequence[Memory]) -> int:
    """Bytes for all of them, decoded one after the other: what is kept of each, and the most that one takes beyond."""
    beyond = max((one.peak - one.kept for one in files), default=0)
    return sum(one.kept for one in files) + max(0, beyond)


class Measured(Protocol):
    """`bytes` is the memory that decoding takes at its peak; `kept` of these are what is decoded, at most."""

    bytes: int
    kept: int

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
