"""One function for every attention: a site knows its role, its kernel, and who shares its sequence.

Kernel and communication are two choices: Ulysses exchanges parts of the sequence for heads, Ring lets keys go round,
and both together are a grid of ranks (USP: Fang and Zhao, arXiv 2405.07719). What each rank computes itself is the
kernel's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from saggar.engine.attention.base import Backend, mask_of
from saggar.engine.attention.parallel.ring import ring_attention
from saggar.engine.attention.parallel.ulysses import to_heads, to_sequence, ulysses_attention
from saggar.engine.errors import Unsupported
from saggar.engine.parallel.mesh import Axis, Mesh, share, shares


@dataclass
class Streams:
    """How long the sequences of the present forward are, over all ranks, by name. The plan's hooks write it.

    `units`: so many tokens stay together, the row of a picture, where it is not 1.
    """

    lengths: dict[str, int] = field(default_factory=dict)
    units: dict[str, int] = field(default_factory=dict)

    def shares(self, name: str, parts: int) -> list[int]:
        """Tokens of each part of a stream."""
        unit = self.units.get(name, 1)
        return [units * unit for units in shares(self.lengths[name] // unit, parts)]


@dataclass(frozen=True)
class Shared:
    """A site whose queries and keys are both cut over the ranks of `mesh.sp`: it attends to the streams of `names`,
    each cut by itself, so that a rank has its part of each, one behind the other.
    """

    mesh: Mesh
    streams: Streams
    names: tuple[str, ...]

    def lengths(self) -> list[int]:
        """Tokens of each rank."""
        parts = self.mesh.sp.size
        return [
            sum(sizes)
            for sizes in zip(*(self.streams.shares(name, parts) for name in self.names), strict=True)
        ]


@dataclass(frozen=True)
class Site:
    """`name` is its module's path in the denoiser. `shared` is None where a rank has all that it attends to."""

    name: str
    role: str
    backend: Backend
    shared: Shared | None = None


def attend(
    site: Site,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of a site; shapes and masks as in `attention.base`. A mask of a shared site is of its own keys alone.

    Unsupported: the kernel, or sharing, cannot do what is asked.
    """
    mask = mask_of(mask, k.shape[1])
    if site.shared is None:
        return site.backend.run(q, k, v, mask, causal, scale)
    if causal or (mask is not None and mask.shape[2] != 1):
        raise Unsupported(f"{site.name}: masks that differ by query cannot be shared over ranks")
    return _over_ranks(site, site.shared, q, k, v, mask, scale)


def _over_ranks(
    site: Site,
    shared: Shared,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    mesh, lengths, heads = shared.mesh, shared.lengths(), q.shape[2]
    ulysses, ring = mesh.ulysses, mesh.ring
    if not q.shape[1] == k.shape[1] == lengths[mesh.sp.index]:
        raise Unsupported(
            f"{site.name}: the sequence plan does not apply: {q.shape[1]} queries and {k.shape[1]} keys are here, and"
            f" the share of {' and '.join(shared.names)} is {lengths[mesh.sp.index]}"
        )
    if k.shape[2] != heads:  # fewer heads of keys than of queries: each is sent as often as it is used
        k, v = (x.repeat_interleave(heads // k.shape[2], dim=2) for x in (k, v))
    mask = None if mask is None else _of_all(mask, lengths, mesh.sp)
    chunks = [lengths[i * ulysses.size : (i + 1) * ulysses.size] for i in range(ring.size)]
    own = chunks[ring.index]
    if ulysses.size > 1 and mask is not None and mask.shape[1] > 1:
        mask = mask[:, share(heads, ulysses)]
    if ring.size == 1:
        return ulysses_attention(site.backend, (q, k, v), own, ulysses, mask, scale)
    if ulysses.size > 1:
        q, k, v = to_heads((q, k, v), own, ulysses)
    out = ring_attention(site.backend, q, k, v, [sum(chunk) for chunk in chunks], ring, mask, scale)
    return to_sequence(out, own, heads, ulysses) if ulysses.size > 1 else out


def _of_all(mask: torch.Tensor, lengths: list[int], axis: Axis) -> torch.Tensor:
    """A mask [B, h, 1, own keys] to [B, h, 1, keys of all ranks]."""
    return gather(mask, 3, lengths, axis)


def gather(part: torch.Tensor, dim: int, lengths: list[int], axis: Axis) -> torch.Tensor:
    """The parts of all ranks, one behind the other along `dim`; `lengths` are theirs. They travel at equal length."""
    longest = max(lengths)
    first = part.movedim(dim, 0)
    sent = first.new_zeros(longest, *first.shape[1:])
    sent[: first.shape[0]] = first
    kind = sent.dtype
    flat = sent.view(torch.uint8) if kind == torch.bool else sent  # no library sends booleans
    received = torch.unflatten(axis.all_gather(flat), 0, (axis.size, -1))
    received = received.view(kind) if kind == torch.bool else received
    whole = torch.cat([piece[:length] for piece, length in zip(received, lengths, strict=True)])
    return whole.movedim(0, dim)
