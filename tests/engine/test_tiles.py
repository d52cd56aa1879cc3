"""Ranks that share the tiles of a decode, as threads of one process: each kind of VAE against its own tiled decode."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from threading import Barrier
from typing import Any

import diffusers
import pytest
import torch
from saggar.engine import EngineConfig
from saggar.engine.memory.decode import spare_memory
from saggar.engine.parallel.mesh import Axis
from saggar.engine.parallel.tiles import share_tiles


@dataclass(frozen=True)
class Rank(Axis):
    """One of several that are threads."""

    barrier: Barrier = field(default_factory=lambda: Barrier(1))
    board: dict[int, torch.Tensor] = field(default_factory=dict)

    def all_gather(self, sent: torch.Tensor) -> torch.Tensor:
        self.board[self.index] = sent
        self.barrier.wait(60)
        gathered = torch.cat([self.board[index] for index in range(self.size)])
        self.barrier.wait(60)
        return gathered


def ranks(size: int) -> list[Rank]:
    barrier, board = Barrier(size), dict[int, torch.Tensor]()
    return [Rank("all", size, index, barrier=barrier, board=board) for index in range(size)]


@dataclass(frozen=True)
class Kind:
    """A VAE of a tiny model, latents [B, C, (frames,) h, w] of several tiles, and how large its tiles are.

    calls: of its decoder for these latents.
    """

    tiny: str
    latents: tuple[int, ...]
    calls: int
    sizes: dict[str, int]
    more: tuple[torch.Tensor, ...] = ()


def sizes(tile: int, stride: int, **more: int) -> dict[str, int]:
    """Of square tiles and the way from one to the next, in pixels."""
    names = ("tile_sample_min", "tile_sample_stride")
    return {
        f"{n}_{side}": s for n, s in zip(names, (tile, stride), strict=True) for side in ("height", "width")
    } | more


BY_LATENTS = {"tile_latent_min_size": 8, "tile_sample_min_size": 32}
IN_TIME = {"tile_sample_min_num_frames": 8, "tile_sample_stride_num_frames": 4}
OVERLAPPING = {
    "tile_latent_min_height": 4,
    "tile_latent_min_width": 4,
    "tile_sample_min_height": 64,
    "tile_sample_min_width": 64,
}
KINDS = [
    Kind("flux", (2, 4, 12, 20), 8, sizes=BY_LATENTS),
    Kind("flux2", (1, 4, 12, 20), 8, sizes=BY_LATENTS),
    Kind("sana", (2, 4, 12, 20), 8, sizes=sizes(32, 24)),
    Kind("qwen-image", (1, 4, 1, 7, 11), 12, sizes=sizes(16, 12)),
    Kind("wan-a14b", (1, 4, 3, 5, 9), 6 * 3, sizes=sizes(32, 24)),  # three frames a tile, through one cache
    Kind("wan-5b", (1, 4, 2, 5, 5), 9 * 2, sizes=sizes(64, 32)),
    Kind("hunyuan-video15", (1, 4, 2, 5, 9), 6, sizes=OVERLAPPING),
    Kind("ltx2", (1, 4, 5, 5, 9), 5 * 6, sizes=sizes(32, 24, **IN_TIME)),
    Kind("stable-audio", (2, 4, 40), 5, sizes={"tile_latent_min_length": 16, "tile_latent_overlap": 4}),
    Kind("ltx2-i2v", (1, 4, 5, 4, 4), 5, sizes=sizes(32, 24, **IN_TIME), more=(torch.tensor([0.05]),)),
]  # fmt: skip


class Family:
    """What is needed of one to tell its VAE to use tiles."""

    name = "family"

    def __init__(self, vae: torch.nn.Module) -> None:
        self._vae = vae

    def decoders(self) -> dict[str, object]:
        return {"vae": self._vae}


def tiled(kind: Kind, folder: Path) -> Any:
    """The VAE, with tiles switched on as the engine does."""
    name = diffusers.DiffusionPipeline.load_config(folder)["vae"][1]
    vae = getattr(diffusers, name).from_pretrained(folder, subfolder="vae")
    spare_memory(EngineConfig(model="x", vae_tiling=True), Family(vae))
    for attribute, size in kind.sizes.items():
        assert hasattr(vae, attribute)
        setattr(vae, attribute, size)
    if hasattr(vae, "tile_latent_min_height") and "tile_latent_min_height" not in kind.sizes:
        vae.enable_tiling()  # it takes the sizes over
    return vae


def counted(vae: Any) -> list[int]:
    """A number for each call of its decoder."""
    calls: list[int] = []
    usual = vae.decoder.forward

    def forward(latents: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(latents.shape[-1])
        return usual(latents, *args, **kwargs)

    vae.decoder.forward = forward
    return calls


@torch.no_grad()
def decode(vae: Any, kind: Kind, latents: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = vae.decode(latents, *kind.more, return_dict=False)[0]
    return out


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.soak), 3])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.tiny)
def test_shared_tiles_make_what_one_rank_makes_of_them(
    models: Callable[[str], Path], kind: Kind, size: int
) -> None:
    latents = torch.randn(kind.latents, generator=torch.Generator().manual_seed(1))
    alone, *shared = [tiled(kind, models(kind.tiny)) for _ in range(size + 1)]
    of_one = counted(alone)
    expected = decode(alone, kind, latents)
    assert len(of_one) == kind.calls
    group = ranks(size)
    calls = [counted(vae) for vae in shared]
    assert all(share_tiles(vae, rank) for vae, rank in zip(shared, group, strict=True))
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(lambda vae: decode(vae, kind, latents), shared))
    for one in found:
        assert torch.equal(one, expected)
    assert sorted(chain(*calls)) == sorted(of_one)  # each tile by one rank alone
    assert max(map(len, calls)) < len(of_one)


def test_what_is_one_tile_is_decoded_by_each_rank(models: Callable[[str], Path]) -> None:
    kind = KINDS[0]
    vae = tiled(kind, models(kind.tiny))
    latents = torch.randn(1, 4, 6, 8)
    expected = decode(vae, kind, latents)
    calls = counted(vae)
    assert share_tiles(vae, ranks(2)[0])  # it would wait for the other
    assert torch.equal(decode(vae, kind, latents), expected)
    assert len(calls) == 1


def test_more_ranks_than_tiles(models: Callable[[str], Path]) -> None:
    kind = KINDS[0]
    latents = torch.randn(1, 4, 12, 8)  # four tiles
    vaes = [tiled(kind, models(kind.tiny)) for _ in range(5)]
    expected = decode(vaes[0], kind, latents)
    calls = [counted(vae) for vae in vaes]
    for vae, rank in zip(vaes, ranks(5), strict=True):
        share_tiles(vae, rank)
    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(lambda vae: decode(vae, kind, latents), vaes))
    assert all(torch.equal(one, expected) for one in found)
    assert list(map(len, calls)) == [1, 1, 1, 1, 0]


def test_nothing_is_shared_where_there_are_no_tiles_or_no_others(models: Callable[[str], Path]) -> None:
    vae = tiled(KINDS[0], models("flux"))
    assert not share_tiles(vae, Axis("all"))
    vae.disable_tiling()
    assert not share_tiles(vae, ranks(2)[0])
    assert not share_tiles(torch.nn.Identity(), ranks(2)[0])
    tiny = diffusers.AutoencoderTiny()
    tiny.enable_tiling()
    assert not share_tiles(tiny, ranks(2)[0])  # it chooses elsewhere: each rank decodes all tiles
