"""Ring: each rank keeps its queries while the chunks of keys and values go round, and merges what they give.

Algorithm: Liu et al., Ring Attention with Blockwise Transformers, arXiv 2310.01889; the merge by log-sum-exp is that of
online softmax, Milakov and Gimelshein, arXiv 1805.02867. Chunks may be of any length, and empty. A mask is cut by
chunk: each gets the columns of its own keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from saggar.engine.attention.base import Backend
from saggar.engine.parallel.mesh import Axis, arrived


def ring_attention(
    backend: Backend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    axis: Axis,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks: [B, own queries, H, D].

    `lengths`: of every rank's chunk of keys. `mask`: [B, 1 or H, 1 or own queries, keys of all ranks], the keys in the
    order of the ranks.
    """
    columns: list[torch.Tensor | None] = (
        [None] * axis.size if mask is None else list(torch.split_with_sizes(mask, list(lengths), -1))
    )
    held = torch.stack((k, v)).contiguous()
    batch, _, heads, width = k.shape
    out: torch.Tensor | None = None
    total = q.new_empty(0)
    for step in range(axis.size):
        source = (axis.index - step) % axis.size
        last = step + 1 == axis.size
        # The next chunk travels while this one is attended to.
        coming = held if last else _pass_on(held, 2 * batch * heads * width, lengths, source, axis)
        piece, lse = backend.run_lse(q, held[0], held[1], columns[source], scale)
        out, total = (piece.float(), lse) if out is None else merge(out, total, piece, lse)
        if not last:
            held = arrived(coming).view(2, batch, lengths[(source - 1) % axis.size], heads, width)
    assert out is not None
    return out.to(q.dtype)


def merge(
    out: torch.Tensor, total: torch.Tensor, piece: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the keys of both: outputs [B, L, H, D] with their log-sum-exps [B, H, L], in float32."""
    both = torch.logaddexp(total, lse)
    # Where neither has a key both are -inf, and their difference is no number.
    kept, added = (
        torch.where(both == -torch.inf, 0.0, torch.exp(part - both)).transpose(1, 2).unsqueeze(-1)
        for part in (total, lse)
    )
    return out * kept + piece.float() * added, both


def _pass_on(held: torch.Tensor, token: int, lengths: Sequence[int], source: int, axis: Axis) -> torch.Tensor:
    """Send the chunk of rank `source` to the next rank, and begin to receive, flat, the one before it from the last.

    `token`: values of one token in the chunk.
    """
    follower, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    sizes_out, sizes_in = [0] * axis.size, [0] * axis.size
    sizes_out[follower] = token * lengths[source]
    sizes_in[before] = token * lengths[(source - 1) % axis.size]
    return axis.exchange(held.view(-1), sizes_in, sizes_out)
