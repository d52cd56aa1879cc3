"""The parameters of Wan, and what the configuration of a checkpoint says: sizes, borders, pictures. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import Field
from pydantic.dataclasses import dataclass
from saggar.engine.models.source.checkpoint import Checkpoint
from saggar.engine.models.torch_family import text_length
from saggar.engine.models.video import frames_grid
from saggar.engine.params import Narrowing

PIXELS = 16
"""The pipelines take no finer sizes."""
SIDE = 16384
FRAMES = 4096
TEXT = 512
"""Tokens of a text; a transformer that reads a picture's tokens too finds them by that number."""


@dataclass(frozen=True)
class WanParams:
    """Defaults as in WanPipeline.__call__; `fps` is that of the models' own videos.

    `guidance_scale` above 1 costs a second forward. `guidance_scale_2` is for the second transformer, null for the
    same.
    """

    height: Annotated[int, Field(ge=1, le=SIDE)] = 480
    width: Annotated[int, Field(ge=1, le=SIDE)] = 832
    num_frames: Annotated[int, Field(ge=1, le=FRAMES)] = 81
    num_inference_steps: Annotated[int, Field(ge=1, le=1000)] = 50
    guidance_scale: Annotated[float, Field(ge=0, le=100)] = 5.0
    guidance_scale_2: Annotated[float, Field(ge=0, le=100)] | None = None
    max_sequence_length: Annotated[int, Field(ge=1, le=TEXT)] = TEXT
    fps: Annotated[float, Field(ge=1, le=120)] = 16.0


class WanConfig:
    """LoadError: a configuration is missing."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def narrowing(self) -> Narrowing:
        """The grid is a patch of latents; the table of positions bounds each side and the frames."""
        longest = int(str(self._transformer.get("rope_max_seq_len", 1024)))
        text = text_length(self._checkpoint, "tokenizer", TEXT)
        if self.reads_pictures:
            text = {"default": TEXT, "minimum": TEXT, "maximum": TEXT}
        frames = (longest * self._patch[0] - 1) * self.frame_factor + 1
        words: dict[str, Any] = {
            "num_frames": {**frames_grid(self.frame_factor), "maximum": min(frames, FRAMES)},
            "max_sequence_length": text,
        }
        for name, cells in zip(("height", "width"), self._patch[1:], strict=True):
            cell = math.lcm(PIXELS, self.factor * cells)
            largest = min(self.factor * cells * longest, SIDE) // cell * cell
            words[name] = {"minimum": cell, "multipleOf": cell, "maximum": largest}
        if self.border is None:
            words["guidance_scale_2"] = {"anyOf": [{"type": "null"}]}
        return words

    def tokens(self, shape: tuple[int, int, int]) -> int:
        """Of latents of so many frames, this height and this width."""
        return math.prod(size // cells for size, cells in zip(shape, self._patch, strict=True))

    @property
    def border(self) -> float | None:
        """The share of the time that is the second transformer's, None where there is one alone."""
        found = self._checkpoint.index.get("boundary_ratio")
        return None if found is None else float(str(found))

    @property
    def expands(self) -> bool:
        """Whether each token has a timestep of its own."""
        return bool(self._checkpoint.index.get("expand_timesteps"))

    @property
    def reads_pictures(self) -> bool:
        """Whether the transformer takes a picture's tokens beside the text's."""
        return self._transformer.get("image_dim") is not None

    @property
    def reads_both(self) -> bool:
        """Whether it has places for a first and a last picture's tokens."""
        return self._transformer.get("pos_embed_seq_len") is not None

    @property
    def factor(self) -> int:
        """Pixels of a latent pixel, along one side."""
        return int(str(self._checkpoint.config("vae").get("scale_factor_spatial", 8)))

    @property
    def frame_factor(self) -> int:
        """Frames of a latent frame."""
        return int(str(self._checkpoint.config("vae").get("scale_factor_temporal", 4)))

    @property
    def _patch(self) -> list[int]:
        return cast("list[int]", self._transformer.get("patch_size", [1, 2, 2]))

    @property
    def _transformer(self) -> Mapping[str, object]:
        return self._checkpoint.config("transformer")
