"""The pictures that drawings are judged by: every emoji in every style at 32×32, in one file.

The file is a zip of ``index.json`` (names, styles) and ``sheet.webp`` (RGBA tiles, style after style).

Letters in shapes: R references (style by style), C channel, H height, W width.
"""

import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

SIDE = 32
COLUMNS = 48


@dataclass(frozen=True)
class References:
    """Names in order, styles in order, and premultiplied RGBA ``pixels_RCHW`` in 0..1; R = styles × names."""

    names: list[str]
    styles: list[str]
    pixels_RCHW: Tensor

    def on(self, colour: tuple[int, int, int] = (255, 255, 255)) -> Tensor:
        """RGB references ``[R, 3, 32, 32]`` in 0..1 on a flat colour (0..255)."""
        under = torch.tensor(colour).view(1, 3, 1, 1) / 255
        return self.pixels_RCHW[:, :3] + under * (1 - self.pixels_RCHW[:, 3:])

    def index(self, style: str, name: str) -> int:
        """Row of one reference."""
        return self.styles.index(style) * len(self.names) + self.names.index(name)


def write(path: Path, names: list[str], styles: list[str], pixels_RCHW: Tensor, quality: int = 92) -> None:
    """Writes straight (not premultiplied) uint8 RGBA tiles ``[R, 4, 32, 32]``."""
    count = len(pixels_RCHW)
    grid = -(-count // COLUMNS)
    tiles = torch.zeros(grid * COLUMNS, 4, SIDE, SIDE, dtype=torch.uint8)
    tiles[:count] = pixels_RCHW
    sheet = tiles.view(grid, COLUMNS, 4, SIDE, SIDE).permute(0, 3, 1, 4, 2)
    sheet = sheet.reshape(grid * SIDE, COLUMNS * SIDE, 4)
    buffer = io.BytesIO()
    Image.fromarray(sheet.numpy(), "RGBA").save(buffer, "WEBP", quality=quality, method=6)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        # ZipInfo has a fixed date: the same pictures give the same file.
        archive.writestr(zipfile.ZipInfo("index.json"), json.dumps({"styles": styles, "names": names}))
        archive.writestr(zipfile.ZipInfo("sheet.webp"), buffer.getvalue())


def read(path: Path) -> References:
    """Reads what ``write`` wrote."""
    with zipfile.ZipFile(path) as archive:
        index = json.loads(archive.read("index.json"))
        sheet = np.array(Image.open(io.BytesIO(archive.read("sheet.webp"))).convert("RGBA"))
    tiles = sheet.reshape(-1, SIDE, COLUMNS, SIDE, 4).transpose(0, 2, 4, 1, 3).reshape(-1, 4, SIDE, SIDE)
    names, styles = index["names"], index["styles"]
    pixels = torch.from_numpy(np.ascontiguousarray(tiles[: len(styles) * len(names)])).float() / 255
    premultiplied = torch.cat([pixels[:, :3] * pixels[:, 3:], pixels[:, 3:]], 1)
    return References(names, styles, premultiplied)
