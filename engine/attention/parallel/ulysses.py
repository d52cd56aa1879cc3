"""Ulysses: ranks that hold a part of the sequence each exchange it for a part of the heads, attend, and exchange back.

Algorithm: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509. Here parts may be uneven, and empty: lengths need not be
a multiple of the ranks, nor heads. What is computed is exactly what one rank would compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from saggar.engine.attention.base import Backend
from saggar.engine.parallel.mesh import Axis, arrived, shares

OVERLAP_BYTES = 64 << 20
"""From so many bytes of queries, keys and values on, a rank attends to a part of its heads while the others travel. For
less, two exchanges take longer than one.
"""


def ulysses_attention(
    backend: Backend,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lengths: Sequence[int],
    axis: Axis,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks, [B, own length, H, D], from three of that shape.

    `mask`: [B, 1 or own heads, 1, keys of all ranks].
    """
    heads = qkv[0].shape[2]
    bytes_ = sum(x.numel() * x.element_size() for x in qkv)
    own = heads // axis.size
    even = heads % axis.size == 0 and len(set(lengths)) == 1
    if even and own > 1 and bytes_ >= OVERLAP_BYTES and (mask is None or mask.shape[1] == 1):
        return _in_two_parts(backend, qkv, own, axis, mask, scale)
    q, k, v = to_heads(qkv, lengths, axis)
    return to_sequence(backend.run(q, k, v, mask, False, scale), lengths, heads, axis)


def _in_two_parts(
    backend: Backend,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    own: int,
    axis: Axis,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """The second half of the heads comes while the first is attended to, whose outputs go while the second is."""
    middle = own // 2
    by_rank = [torch.unflatten(x, 2, (axis.size, own)) for x in qkv]
    coming = [
        axis.exchange(torch.stack([x[:, :, :, part].movedim(2, 0) for x in by_rank], dim=1))
        for part in (slice(0, middle), slice(middle, own))
    ]
    going = []
    for received in coming:
        q, k, v = arrived(received).permute(1, 2, 0, 3, 4, 5).flatten(2, 3).unbind(0)
        out = backend.run(q, k, v, mask, False, scale)
        going.append(axis.exchange(torch.unflatten(out, 1, (axis.size, -1)).movedim(1, 0)))
    # [from rank, B, l, heads of that rank, D]
    whole = torch.cat([arrived(part) for part in going], dim=3)
    return whole.permute(1, 2, 0, 3, 4).flatten(2, 3)


def to_heads(tensors: Sequence[torch.Tensor], lengths: Sequence[int], axis: Axis) -> tuple[torch.Tensor, ...]:
    """Each [B, own length, H, D] to [B, all lengths, own heads, D], in one exchange for all of them.

    `lengths`: of every rank's part of the sequence, in their order along the axis.
    """
    heads = tensors[0].shape[2]
    alike = all(tensor.shape == tensors[0].shape for tensor in tensors)
    if alike and heads % axis.size == 0 and len(set(lengths)) == 1:
        return _to_heads_evenly(tensors, axis)
    parts = shares(heads, axis.size)
    sent = [
        torch.cat([piece.reshape(-1) for piece in pieces])
        for pieces in zip(*(torch.split_with_sizes(tensor, parts, 2) for tensor in tensors), strict=True)
    ]
    batch, width, mine = tensors[0].shape[0], tensors[0].shape[3], parts[axis.index]
    sizes = [batch * length * mine * width * len(tensors) for length in lengths]
    received = _exchange(sent, sizes, axis)
    by_rank = [
        flat.view(len(tensors), batch, length, mine, width)
        for flat, length in zip(received, lengths, strict=True)
    ]
    return torch.cat(by_rank, dim=2).unbind(0)


def to_sequence(out: torch.Tensor, lengths: Sequence[int], heads: int, axis: Axis) -> torch.Tensor:
    """[B, all lengths, own heads, D] back to [B, own length, H, D]; `heads` are those of all ranks."""
    if heads % axis.size == 0 and len(set(lengths)) == 1:
        return _to_sequence_evenly(out, axis)
    batch, width, mine = out.shape[0], out.shape[3], lengths[axis.index]
    sent = [piece.reshape(-1) for piece in torch.split_with_sizes(out, list(lengths), 1)]
    parts = shares(heads, axis.size)
    received = _exchange(sent, [batch * mine * part * width for part in parts], axis)
    pieces = [flat.view(batch, mine, part, width) for flat, part in zip(received, parts, strict=True)]
    return torch.cat(pieces, dim=2)


def _to_heads_evenly(tensors: Sequence[torch.Tensor], axis: Axis) -> tuple[torch.Tensor, ...]:
    """One copy on each side of the exchange."""
    # [to rank, tensor, B, l, heads of that rank, D]
    sent = torch.stack(
        [torch.unflatten(tensor, 2, (axis.size, -1)).movedim(2, 0) for tensor in tensors], dim=1
    )
    received = arrived(axis.exchange(sent))
    return received.permute(1, 2, 0, 3, 4, 5).flatten(2, 3).unbind(0)


def _to_sequence_evenly(out: torch.Tensor, axis: Axis) -> torch.Tensor:
    sent = torch.unflatten(out, 1, (axis.size, -1)).movedim(1, 0).contiguous()  # [to rank, B, l, h, D]
    received = arrived(axis.exchange(sent))
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _exchange(sent: Sequence[torch.Tensor], sizes: Sequence[int], axis: Axis) -> tuple[torch.Tensor, ...]:
    """A flat piece to each rank, and one of `sizes` from each."""
    received = arrived(axis.exchange(torch.cat(list(sent)), sizes, [piece.numel() for piece in sent]))
    return tuple(torch.split_with_sizes(received, list(sizes)))
