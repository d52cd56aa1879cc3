"""Ulysses, Ring and both over ranks of gloo, beside one process: a site alone, without any engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from saggar.engine.attention.backends.torch_sdpa import TorchSdpa
from saggar.engine.attention.parallel.ring import merge
from saggar.engine.attention.site import Shared, Site, Streams, attend, gather
from saggar.engine.degrees import Degrees
from saggar.engine.parallel.convolve import share_convolution
from saggar.engine.parallel.mesh import Mesh, share, shares

ATOL = 1e-5


@dataclass(frozen=True)
class Shape:
    """Streams of these lengths; `mask`: none, booleans by key, numbers by key, or by head and key."""

    heads: int
    lengths: tuple[int, ...]
    mask: str = "none"
    key_heads: int | None = None


SHAPES = [
    Shape(4, (16,)),
    Shape(3, (16,)),
    Shape(4, (17, 5)),
    Shape(3, (7, 1)),
    Shape(2, (1,)),
    Shape(4, (3, 2)),
    Shape(4, (9, 6), "bool"),
    Shape(3, (11,), "float"),
    Shape(3, (5, 4), "heads"),
    Shape(4, (13,), "first half"),
    Shape(4, (10,), "none", key_heads=2),
]
WORLDS = [
    Degrees(ulysses=2),
    Degrees(ring=2),
    Degrees(ulysses=3),
    Degrees(ring=3),
    Degrees(ulysses=2, ring=2),
    Degrees(ulysses=4),
    Degrees(ring=4),
    Degrees(ulysses=2, cfg=2),
]


def tensors(shape: Shape) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """q, k and v whole, [2, L, H, 8] each, and a mask of all keys."""
    made = torch.Generator().manual_seed(sum(shape.lengths) * 10 + shape.heads)
    length, key_heads = sum(shape.lengths), shape.key_heads or shape.heads
    qkv = [torch.randn(2, length, heads, 8, generator=made) for heads in (shape.heads, key_heads, key_heads)]
    mask = {
        "none": None,
        "bool": torch.rand(2, length, generator=made) > 0.4,
        "float": torch.randn(2, 1, 1, length, generator=made),
        "heads": torch.randn(2, shape.heads, 1, length, generator=made),
        "first half": (torch.arange(length) < length // 2).expand(2, length),
    }[shape.mask]
    return qkv, mask


def cut(x: torch.Tensor, dim: int, lengths: Sequence[int], mesh: Mesh) -> torch.Tensor:
    """This rank's part of each stream."""
    streams = torch.split_with_sizes(x, list(lengths), dim)
    return torch.cat(
        [s.narrow(dim, (p := share(s.shape[dim], mesh.sp)).start, p.stop - p.start) for s in streams], dim
    )


def difference(shape: Shape, mesh: Mesh) -> float:
    """The largest between this rank's part and the same part of one process's attention."""
    qkv, mask = tensors(shape)
    names = tuple(map(str, range(len(shape.lengths))))
    shared = Shared(mesh, Streams(dict(zip(names, shape.lengths, strict=True))), names)
    alone = Site("site", "joint", TorchSdpa())
    expected = cut(attend(alone, *qkv, mask), 1, shape.lengths, mesh)
    mine = [cut(x, 1, shape.lengths, mesh) for x in qkv]
    mask = None if mask is None else cut(mask, mask.ndim - 1, shape.lengths, mesh)
    found = attend(Site("site", "joint", TorchSdpa(), shared), *mine, mask)
    assert found.shape == expected.shape
    return float((found - expected).abs().max()) if found.numel() else 0.0


def compiled(mesh: Mesh) -> float:
    """How far a site in a compiled function is from the same one outside; a graph break raises."""
    q, k, v = (torch.randn(1, 6, 4, 8) for _ in range(3))
    shared = Shared(mesh, Streams({"text": 6 * mesh.sp.size}), ("text",))
    site = Site("site", "joint", TorchSdpa(), shared)

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(site, q * 2, k, v) + 1

    found = torch.compile(block, fullgraph=True, backend="eager")(q, k, v)
    return float((found - block(q, k, v)).abs().max())


def overlapped(mesh: Mesh) -> float:
    """How far large exchanges, which go in two parts, are from one, with a mask of keys and an odd number of heads."""
    from saggar.engine.attention.parallel import ulysses

    if mesh.ring.size > 1:
        return 0.0
    axis, heads = mesh.ulysses, 3 * mesh.ulysses.size
    q, k, v = (torch.randn(2, 4, heads, 8) for _ in range(3))
    mask = torch.ones(2, 1, 1, 4 * axis.size, dtype=torch.bool)
    mask[0, ..., -3:] = False
    lengths = [4] * axis.size
    small = ulysses.ulysses_attention(TorchSdpa(), (q, k, v), lengths, axis, mask)
    usual, ulysses.OVERLAP_BYTES = ulysses.OVERLAP_BYTES, 0
    large = ulysses.ulysses_attention(TorchSdpa(), (q, k, v), lengths, axis, mask)
    ulysses.OVERLAP_BYTES = usual
    return float((large - small).abs().max())


def gathered(mesh: Mesh) -> bool:
    """Whether uneven parts come together, numbers and booleans."""
    whole = torch.arange(2 * 5 * 3).view(2, 5, 3)
    lengths = list(shares(5, mesh.sp.size))
    part = cut(whole, 1, (5,), mesh)
    same = torch.equal(gather(part, 1, lengths, mesh.sp), whole)
    return same and torch.equal(gather(part > 7, 1, lengths, mesh.sp), whole > 7)


def convolved(mesh: Mesh, rows: int) -> float:
    """How far a depthwise convolution of a picture in parts is from that of the whole, 5 channels and 4 pixels wide."""
    torch.manual_seed(rows)
    picture = torch.randn(2, 5, rows, 4)
    depth, pixels = torch.nn.Conv2d(5, 5, 3, padding=1, groups=5), torch.nn.Conv2d(5, 3, 1)
    part = share(rows, mesh.sp)
    expected = pixels(depth(picture))[:, :, part]
    streams = Streams({"image": rows * 4}, {"image": 4})
    for name, module in (("depth", depth), ("pixels", pixels)):
        share_convolution(name, module, "image", mesh.sp, streams)
    found = pixels(depth(picture[:, :, part]))
    assert found.shape == expected.shape
    return float((found - expected).abs().max()) if found.numel() else 0.0


def rank(number: int, degrees: Degrees, port_file: str, results: Any) -> None:
    """One process of a world."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=number, world_size=degrees.size)
    mesh = Mesh.of(degrees, number, lambda ranks: dist.new_group(list(ranks)))
    with torch.inference_mode():
        found = [difference(shape, mesh) for shape in SHAPES]
        assert max(convolved(mesh, rows) for rows in (1, 3, 8)) <= ATOL
        assert compiled(mesh) <= ATOL
        assert overlapped(mesh) <= ATOL
        results.put((number, found, gathered(mesh)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.procs
@pytest.mark.parametrize(
    "degrees",
    [pytest.param(d, marks=() if d.size == 4 and d.ring == 2 else pytest.mark.soak) for d in WORLDS],
    ids=str,
)
def test_parts_of_a_sequence_are_attended_to_as_the_whole(degrees: Degrees, tmp_path: Path) -> None:
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    mp.spawn(rank, (degrees, str(tmp_path / "store"), results), nprocs=degrees.size)  # type: ignore[no-untyped-call]
    told = [results.get() for _ in range(degrees.size)]
    assert sorted(number for number, _, _ in told) == list(range(degrees.size))
    assert all(whole for _, _, whole in told)
    for number, found, _ in told:
        for shape, value in zip(SHAPES, found, strict=True):
            assert value <= ATOL, f"rank {number}: {shape}"


def test_chunks_merge_to_the_attention_over_all_of_their_keys() -> None:
    kernel = TorchSdpa()
    q, k, v = (torch.randn(2, 6, 3, 8) for _ in range(3))
    out, lse = kernel.run_lse(q, k[:, :4], v[:, :4])
    out, lse = merge(out, lse, *kernel.run_lse(q, k[:, 4:4], v[:, 4:4]))
    out, lse = merge(out, lse, *kernel.run_lse(q, k[:, 4:], v[:, 4:]))
    whole, total = kernel.run_lse(q, k, v)
    torch.testing.assert_close(out, whole, atol=1e-6, rtol=0)
    torch.testing.assert_close(lse, total, atol=1e-6, rtol=0)


def test_two_chunks_without_any_key_merge_to_nothing_and_not_to_a_nan() -> None:
    kernel = TorchSdpa()
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 0, 1, 8)
    out, lse = merge(*kernel.run_lse(q, k, k), *kernel.run_lse(q, k, k))
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_a_compiler_follows_lengths_that_change() -> None:
    """The levels of a UNet have one each, and its blocks one compiled form."""
    streams = Streams()

    @torch.compile(fullgraph=True, backend="eager")
    def first(x: torch.Tensor) -> torch.Tensor:
        return x[: streams.shares("image", 3)[0]]

    for length, share_of_first in ((7, 3), (10, 4), (11, 4), (2, 1)):
        streams.lengths["image"] = length
        assert len(first(torch.zeros(length))) == share_of_first
