"""The picture set in memory: RGBA sprites, and which of them have one hue that can be changed.

Letters in shapes: S style, N emoji, C channel, H height, W width.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from training.fetch import COLUMNS, STYLES, TILE
from training.names import Emoji

# A sprite can be recoloured when it is saturated enough, and most of what is saturated shares one hue.
SATURATED = 0.30
COLOURED_SHARE = 0.45
ONE_HUE_SHARE = 0.70
HUE_WINDOW = 30 / 360  # turns to either side of the main hue that are recoloured with it


@dataclass(frozen=True)
class Sprites:
    """Emoji and their uint8 RGBA pictures; ``hues_SN`` in turns, nan for a sprite without a main hue."""

    emoji: list[Emoji]
    pictures_SNCHW: Tensor
    hues_SN: Tensor


def load(folder: Path, limit: int | None = None) -> Sprites:
    """Reads a fetched picture set, or only its first ``limit`` emoji spread evenly over the set."""
    listed = json.loads((folder / "index.json").read_text())
    emoji = [Emoji(e["code"], e["name"], tuple(e["aliases"]), e["group"]) for e in listed]
    pictures = torch.stack([read_sheet(folder / f"{style}.webp", len(emoji)) for style in STYLES])
    if limit is not None:
        chosen = torch.linspace(0, len(emoji) - 1, limit).long()
        emoji, pictures = [emoji[i] for i in chosen.tolist()], pictures[:, chosen]
    return Sprites(emoji, pictures, torch.stack([main_hues(style) for style in pictures]))


def read_sheet(path: Path, count: int) -> Tensor:
    """Cuts one sheet into ``[N, 4, 128, 128]`` uint8 tiles."""
    sheet = np.array(Image.open(path).convert("RGBA"))
    tiles = sheet.reshape(-1, TILE, COLUMNS, TILE, 4).transpose(0, 2, 4, 1, 3)
    return torch.from_numpy(np.ascontiguousarray(tiles.reshape(-1, 4, TILE, TILE)[:count]))


def main_hues(pictures_NCHW: Tensor) -> Tensor:
    """The one hue of each uint8 RGBA picture in turns, nan for grey or many-coloured ones: ``[N]``."""
    return torch.cat(
        [_hues_of(part[:, :, ::4, ::4].float() / 255) for part in torch.split(pictures_NCHW, 128)]
    )


def _hues_of(pictures_NCHW: Tensor) -> Tensor:
    hue, saturation, value = to_hsv(pictures_NCHW[:, :3]).flatten(2).unbind(1)
    solid = (pictures_NCHW[:, 3].flatten(1) > 0.5).float()
    coloured = solid * (saturation > SATURATED) * (value > 0.2)
    # Vote of 36 bins of 10 degrees; the winner is refined to the mean direction of its neighbourhood.
    bins = torch.nn.functional.one_hot((hue * 36).long() % 36, 36).float()
    votes = (bins * coloured[..., None]).sum(1)
    winner = (votes.argmax(1).float() + 0.5) / 36
    near = coloured * (turn_distance(hue, winner[:, None]).abs() < HUE_WINDOW)
    total = coloured.sum(1).clamp(min=1)
    refined = winner + (turn_distance(hue, winner[:, None]) * near).sum(1) / near.sum(1).clamp(min=1)
    fits = (total / solid.sum(1).clamp(min=1) > COLOURED_SHARE) & (near.sum(1) / total > ONE_HUE_SHARE)
    return torch.where(fits, refined % 1.0, torch.full_like(refined, float("nan")))


def turn_distance(a: Tensor, b: Tensor) -> Tensor:
    """Signed shortest way from ``b`` to ``a`` round the hue circle, in turns."""
    return (a - b + 0.5) % 1.0 - 0.5


def to_hsv(rgb: Tensor) -> Tensor:
    """RGB ``[B, 3, ...]`` in 0..1 to hue (turns), saturation, value."""
    value, largest = rgb.max(1)
    spread = value - rgb.min(1).values
    safe = spread.clamp(min=1e-6)
    r, g, b = rgb.unbind(1)
    sectors = torch.stack([(g - b) / safe % 6, (b - r) / safe + 2, (r - g) / safe + 4], 1)
    hue = sectors.gather(1, largest[:, None]).squeeze(1) / 6
    return torch.stack([hue * (spread > 1e-6), spread / value.clamp(min=1e-6), value], 1)


def to_rgb(hsv: Tensor) -> Tensor:
    """Hue (turns), saturation, value ``[B, 3, ...]`` back to RGB in 0..1."""
    hue, saturation, value = hsv.unbind(1)
    channels = []
    for offset in (5, 3, 1):
        k = (offset + hue * 6) % 6
        channels.append(value - value * saturation * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, 1)
