"""Reference pictures: what the VAE makes of them stands behind the latents in every forward, with positions of its own.

The prediction's first tokens are the picture's. Rows of one forward share the sizes of their references, for the
transformers take the positions of all rows from the first; the batch key has the sizes of the inputs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from saggar.engine.models.state import Row
from saggar.engine.request import Request

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

MOST = 10
"""Pictures of a request, where a pipeline knows no bound: each costs as many tokens as an output."""
AREA = 1024 * 1024
"""Pixels that most pipelines bring a reference to."""


def pictures(request: Request) -> list[Image]:
    """In their order, without transparency."""
    from saggar.engine.models.common import picture

    return [picture(array) for array in request.inputs["image"]]


def sizes(request: Request) -> list[tuple[int, int]]:
    """Height and width of each picture of a request, in their order."""
    arrays: Sequence[Any] = request.inputs.get("image", ())
    return [array.shape[:2] for array in arrays]


def of_area(height: int, width: int, area: float, multiple: int) -> tuple[int, int]:
    """The size of about so many pixels with the ratio of this one, as Qwen-Image's pipelines round it."""
    ratio = width / height
    wide = math.sqrt(area * ratio)
    return round(wide / ratio / multiple) * multiple, round(wide / multiple) * multiple


@dataclass(frozen=True)
class Seen:
    """The pictures that a text is encoded with; equal for equal ones, and only their digest is written down."""

    digest: str
    pictures: tuple[Image, ...] = field(compare=False, repr=False)

    @classmethod
    def of(cls, pictures: Sequence[Image]) -> Seen:
        """In their order."""
        digest = hashlib.sha256()
        for picture in pictures:
            digest.update(f"{picture.size}".encode() + picture.tobytes())
        return cls(digest.hexdigest(), tuple(pictures))


def behind(rows: Sequence[Row[torch.Tensor, Any, Any]], latents: torch.Tensor) -> torch.Tensor:
    """Latents of the rows [rows, tokens, ...], with each row's `references` [1, more tokens, ...] behind them."""
    import torch

    if "references" not in rows[0].state.extras:
        return latents
    references = torch.cat([row.state.extras["references"] for row in rows])
    return torch.cat([latents, references.to(latents.dtype)], dim=1)
