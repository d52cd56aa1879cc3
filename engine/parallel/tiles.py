"""Ranks share the tiles of a VAE's tiled decode: each decodes its part of them, and learns those of the others.

The VAE's own code cuts, blends and joins: it runs twice. The first time its decoder is asked only for the tiles of this
rank, and zeros stand for the others; then the ranks exchange what they decoded, and the second time every tile is
there. So the picture is bit for bit the one that a rank alone makes by tiles. It is known for AutoencoderKL, whose
decoder is called once a tile and keeps nothing between two; with other VAEs every rank decodes all tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKL
from saggar.engine.parallel.mesh import Axis


def share_tiles(vae: torch.nn.Module, axis: Axis) -> bool:
    """Whether this VAE's tiles are shared from now on."""
    if axis.size == 1 or not isinstance(vae, AutoencoderKL):
        return False
    alone: Callable[..., Any] = vae.tiled_decode
    tiles = _Tiles(vae, axis)

    def together(z: torch.Tensor, return_dict: bool = True) -> Any:
        usual = vae.decoder.forward
        try:
            vae.decoder.forward = tiles.mine(usual)
            alone(z, return_dict=return_dict)
            vae.decoder.forward = tiles.all()
            return alone(z, return_dict=return_dict)
        finally:
            vae.decoder.forward = usual

    vae.tiled_decode = together
    return True


class _Tiles:
    """Of one decode: what this rank has decoded, and the shapes of all, by their order."""

    def __init__(self, vae: AutoencoderKL, axis: Axis) -> None:
        self._axis = axis
        self._channels = int(vae.config.out_channels)
        self._factor = 2 ** (len(vae.config.block_out_channels) - 1)
        self._shapes: list[torch.Size] = []
        self._decoded: list[torch.Tensor] = []
        self._nothing = torch.empty(0)

    def mine(self, decode: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """A decoder of every `size`-th tile, and of zeros for the rest."""
        self._shapes, self._decoded = [], []

        def one(tile: torch.Tensor, *more: Any) -> torch.Tensor:
            count, _, high, wide = tile.shape
            shape = torch.Size((count, self._channels, high * self._factor, wide * self._factor))
            self._shapes.append(shape)
            self._nothing = tile.new_empty(0)
            if (len(self._shapes) - 1) % self._axis.size != self._axis.index:
                return tile.new_zeros(shape)
            out = decode(tile, *more)
            assert out.shape == shape, f"a tile of {list(tile.shape)} became {list(out.shape)}"
            self._decoded.append(out.clone())  # blending writes into what it is given
            return out

        return one

    def all(self) -> Callable[..., torch.Tensor]:
        """A decoder that knows every tile already."""
        known = iter(self._exchanged())
        return lambda tile, *more: next(known)

    def _exchanged(self) -> list[torch.Tensor]:
        """All tiles in their order. They travel in rounds, one of each rank, filled up to the largest."""
        size, found = self._axis.size, []
        for start in range(0, len(self._shapes), size):
            shapes = self._shapes[start : start + size]
            longest = max(shape.numel() for shape in shapes)
            turn = start // size
            mine = self._decoded[turn] if turn < len(self._decoded) else self._nothing
            sent = mine.new_zeros(longest)
            sent[: mine.numel()] = mine.reshape(-1)
            received = self._axis.all_gather(sent).view(size, longest)
            found += [
                flat[: shape.numel()].view(shape) for flat, shape in zip(received, shapes, strict=False)
            ]
        return found
