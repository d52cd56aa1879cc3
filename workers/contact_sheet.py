"""Many pictures on one, with their captions: what a run shows at its end."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

SMALLEST_TILE = 128
LARGEST_TILE = 384

_GAP = 12
_FONT_SIZE = 13
_LINE_HEIGHT = 17
_CAPTION_LINES = 3
_PAPER = (250, 249, 246)
_INK = (40, 40, 40)

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def contact_sheet(images: Sequence[NDArray[np.uint8]], captions: Sequence[str], columns: int) -> bytes:
    """A PNG of all pictures (uint8, height × width × 3) in rows of `columns`, each above its caption.

    Pictures whose longer side is below 128 pixels are enlarged to that, so that captions have room to be
    read; those above 384 are reduced. Captions are wrapped to three lines. Raises ValueError without
    pictures or columns.
    """
    if not images or columns < 1 or len(images) != len(captions):
        raise ValueError(
            f"{len(images)} pictures, {len(captions)} captions and {columns} columns make no sheet"
        )
    tiles = [_tile(image) for image in images]
    width = max(tile.width for tile in tiles)
    height = max(tile.height for tile in tiles)
    cell = (width + _GAP, height + _CAPTION_LINES * _LINE_HEIGHT + _GAP)
    across = min(columns, len(tiles))
    sheet = Image.new("RGB", (across * cell[0] + _GAP, -(-len(tiles) // across) * cell[1] + _GAP), _PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(_FONT_SIZE)
    for number, (tile, caption) in enumerate(zip(tiles, captions, strict=True)):
        left, top = _GAP + number % across * cell[0], _GAP + number // across * cell[1]
        sheet.paste(tile, (left + (width - tile.width) // 2, top + height - tile.height))
        for line, text in enumerate(wrapped(caption, width, font)):
            draw.text((left, top + height + 3 + line * _LINE_HEIGHT), text, fill=_INK, font=font)
    target = io.BytesIO()
    sheet.save(target, "PNG", compress_type=zlib.Z_RLE)
    return target.getvalue()


def wrapped(caption: str, width: int, font: Font) -> list[str]:
    """At most three lines, each no wider than `width` pixels; what does not fit ends in an ellipsis."""
    lines: list[str] = []
    words = caption.split()
    while words and len(lines) < _CAPTION_LINES:
        line = words.pop(0)
        while words and font.getlength(f"{line} {words[0]}") <= width:
            line += f" {words.pop(0)}"
        last = len(lines) == _CAPTION_LINES - 1 and bool(words)
        lines.append(_cut(line, width, font, always=last))
    return lines


def _cut(line: str, width: int, font: Font, *, always: bool) -> str:
    if font.getlength(line) <= width and not always:
        return line
    while line and font.getlength(line + "…") > width:
        line = line[:-1]
    return line.rstrip() + "…"


def _tile(array: NDArray[np.uint8]) -> Image.Image:
    image = Image.fromarray(np.ascontiguousarray(array))
    longest = max(image.size)
    if SMALLEST_TILE <= longest <= LARGEST_TILE:
        return image
    scale = (SMALLEST_TILE if longest < SMALLEST_TILE else LARGEST_TILE) / longest
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.LANCZOS)
