"""Draws recipes as pictures, many at once, on whatever device the sprites are on.

Letters in shapes: B batch, C channel, H height, W width. Sizes in pixels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from training.captions import BACKGROUNDS, HUES
from training.sprites import HUE_WINDOW, Sprites, to_hsv, to_rgb, turn_distance

INSET = 0.8  # an emoji on a coloured background leaves a border of a tenth on each side


def inset(size: int) -> int:
    """Side of an emoji that stands on a background of this size: even, so that it can be centred."""
    return int(size * INSET) // 2 * 2


class Composer:
    """Holds the sprites at the sizes that pictures of ``sizes`` need."""

    def __init__(self, sprites: Sprites, sizes: tuple[int, ...], device: torch.device) -> None:
        self.count = len(sprites.emoji)
        self.hues = sprites.hues_SN.flatten().to(device)
        self.palette = torch.tensor(list(BACKGROUNDS.values()), device=device) / 255
        self.targets = torch.tensor(list(HUES.values()), device=device) / 360
        flat = sprites.pictures_SNCHW.flatten(0, 1)
        needed = {side for size in sizes for side in (size, inset(size), size // 2)}
        self.atlas = {side: _shrink(flat, side, device) for side in sorted(needed)}

    def draw(self, recipes_B5: Tensor, size: int) -> Tensor:
        """Pictures ``[B, 3, size, size]`` in -1..1 of recipe rows (style, first, second, hue, background)."""
        style, first, second, hue, background = recipes_B5.unbind(1)
        pair, plain = second >= 0, background < 0
        colour = self.palette[background.clamp(min=0)].masked_fill(plain[:, None], 1.0)
        canvas = colour[:, :, None, None].expand(-1, -1, size, size).contiguous()
        self._paste(canvas, (~pair & plain).nonzero()[:, 0], style, first, hue, size, (0, 0))
        side = inset(size)
        edge = (size - side) // 2
        self._paste(canvas, (~pair & ~plain).nonzero()[:, 0], style, first, hue, side, (edge, edge))
        half, rows = size // 2, pair.nonzero()[:, 0]
        self._paste(canvas, rows, style, first, hue, half, (half // 2, 0))
        self._paste(canvas, rows, style, second, torch.full_like(hue, -1), half, (half // 2, half))
        return canvas * 2 - 1

    def _paste(
        self,
        canvas: Tensor,
        rows: Tensor,
        style: Tensor,
        emoji: Tensor,
        hue: Tensor,
        side: int,
        at: tuple[int, int],
    ) -> None:
        """Lays sprites of ``side`` over the canvases ``rows``, upper left corner ``at`` (row, column)."""
        if len(rows) == 0:
            return
        index = style[rows] * self.count + emoji[rows]
        sprite = self.atlas[side][index].float()
        dyed = (hue[rows] >= 0).nonzero()[:, 0]
        if len(dyed):
            sprite[dyed] = recolour(sprite[dyed], self.hues[index[dyed]], self.targets[hue[rows][dyed]])
        top, left = at
        under = canvas[rows, :, top : top + side, left : left + side]
        canvas[rows, :, top : top + side, left : left + side] = sprite[:, :3] + under * (1 - sprite[:, 3:])


def recolour(sprite_BCHW: Tensor, own_B: Tensor, target_B: Tensor) -> Tensor:
    """Turns the main hue of premultiplied RGBA sprites to the target hue (turns); other hues stay."""
    alpha = sprite_BCHW[:, 3:]
    hsv = to_hsv((sprite_BCHW[:, :3] / alpha.clamp(min=1e-3)).clamp(0, 1))
    own, target = own_B[:, None, None], target_B[:, None, None]
    near = (turn_distance(hsv[:, 0], own).abs() < HUE_WINDOW * 1.2).float()
    turned = torch.stack([(hsv[:, 0] + near * (target - own)) % 1.0, hsv[:, 1], hsv[:, 2]], 1)
    return torch.cat([to_rgb(turned) * alpha, alpha], 1)


def _shrink(pictures_NCHW: Tensor, side: int, device: torch.device) -> Tensor:
    """Premultiplied float16 sprites ``[N, 4, side, side]`` in 0..1 from uint8 RGBA."""
    done = []
    for part in torch.split(pictures_NCHW, 256):
        rgba = part.to(device).float() / 255
        pre = torch.cat([rgba[:, :3] * rgba[:, 3:], rgba[:, 3:]], 1)
        if side != pre.shape[-1]:
            pre = F.interpolate(pre, (side, side), mode="bilinear", antialias=True)
        done.append(pre.half())
    return torch.cat(done)
