"""Ranks share the tiles of a VAE's decode: each decodes its part of them, and learns those of the others.

The VAE's own code cuts, blends and joins: it runs twice. The first time its decoder only writes down what it is asked,
and answers with empty latents. Then each rank decodes its share and the ranks exchange what came out, and the second
time every answer is known. So the result is bit for bit the one that a rank alone makes by tiles, in space or in time.
Frames that are decoded one after the other through one cache stay together on a rank.

What it needs: that cutting and blending bear latents in the place of what they become, as those of diffusers' VAEs do
(each kind is tested), and that a decoder draws no noise of its own, which it would draw in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Protocol, cast

import torch
from saggar.engine.parallel.mesh import Axis

Decoder = Callable[..., torch.Tensor]


def share_tiles(vae: torch.nn.Module, axis: Axis) -> bool:
    """Whether this VAE's tiles are shared from now on: it decodes by tiles, and there is somebody to share with."""
    if axis.size == 1 or not getattr(vae, "use_tiling", False) or not hasattr(vae, "_decode"):
        return False
    tiled = cast(_Tiled, vae)
    alone, decoder = tiled._decode, tiled.decoder

    def together(*args: Any, **kwargs: Any) -> Any:
        return _decode(decoder, partial(alone, *args, **kwargs), axis)

    tiled._decode = together
    return True


class _Tiled(Protocol):
    """What diffusers' VAEs have in common. `_decode` chooses the tiles and is private: a test tells when it moves."""

    decoder: torch.nn.Module
    _decode: Callable[..., Any]


@dataclass(frozen=True)
class _Call:
    """One question to a decoder: latents [B, C, (frames,) h, w], and what else it was given."""

    latents: torch.Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def follows(self, other: _Call) -> bool:
        """Whether it goes on with what the other has left in a cache."""
        cache = self.kwargs.get("feat_cache")
        return cache is not None and cache is other.kwargs.get("feat_cache")


def _decode(decoder: torch.nn.Module, decode: Callable[[], Any], axis: Axis) -> Any:
    usual: Decoder = decoder.forward
    calls: list[_Call] = []

    def note(latents: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(_Call(latents, args, kwargs))
        return torch.zeros_like(latents)  # not the latents themselves: blending writes into what it is given

    with _answering(decoder, note):
        decode()
    tiles = _tiles(calls)
    if len(tiles) == 1:
        return decode()
    mine = {
        number: [usual(call.latents, *call.args, **call.kwargs) for call in tile]
        for number, tile in enumerate(tiles)
        if number % axis.size == axis.index
    }
    answers = iter(_exchanged(tiles, mine, axis))
    with _answering(decoder, lambda *args, **kwargs: next(answers)):
        return decode()


@contextmanager
def _answering(decoder: torch.nn.Module, answer: Decoder) -> Iterator[None]:
    usual = decoder.forward
    decoder.forward = answer
    try:
        yield
    finally:
        decoder.forward = usual


def _tiles(calls: Sequence[_Call]) -> list[list[_Call]]:
    """The calls that one rank must make, in their order."""
    tiles: list[list[_Call]] = []
    for call in calls:
        if tiles and call.follows(tiles[-1][-1]):
            tiles[-1].append(call)
        else:
            tiles.append([call])
    return tiles


def _exchanged(
    tiles: Sequence[Sequence[_Call]], mine: dict[int, list[torch.Tensor]], axis: Axis
) -> list[torch.Tensor]:
    """The answers to all calls; empties `mine`. Tiles travel in rounds, one of each rank, filled up to the longest."""
    shapes = _shapes(tiles, mine, axis)
    lengths = [sum(map(prod, tile)) for tile in shapes]
    found: list[torch.Tensor] = []
    for first in range(0, len(tiles), axis.size):
        members = range(first, min(first + axis.size, len(tiles)))
        sent = tiles[0][0].latents.new_zeros(max(lengths[number] for number in members))
        own = [answer.reshape(-1) for answer in mine.pop(first + axis.index, ())]
        if own:
            sent[: lengths[first + axis.index]] = torch.cat(own)
        for number, received in zip(members, axis.all_gather(sent).view(axis.size, -1), strict=False):
            parts = received[: lengths[number]].split([prod(shape) for shape in shapes[number]])
            found += [part.view(shape) for part, shape in zip(parts, shapes[number], strict=True)]
    return found


def _shapes(
    tiles: Sequence[Sequence[_Call]], mine: Mapping[int, list[torch.Tensor]], axis: Axis
) -> list[list[list[int]]]:
    """Of each call's answer, by tile: who has it tells the others."""
    latents = tiles[0][0].latents
    rows = [
        list(answer.shape)
        for number, tile in enumerate(tiles)
        for answer in mine.get(number, [torch.empty([0] * latents.ndim)] * len(tile))
    ]
    told = axis.all_gather(torch.tensor(rows, device=latents.device))
    known = iter(told.view(axis.size, len(rows), latents.ndim).amax(0).tolist())
    return [[next(known) for _ in tile] for tile in tiles]
