"""Convolutions between attentions, for ranks that share a picture by rows: exact, and without a halo.

A convolution of single pixels needs no neighbour. One that keeps channels apart (depthwise) is exchanged like heads in
Ulysses: each rank gets all rows of a part of the channels, convolves, and gives back.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from saggar.engine.attention.parallel.ulysses import to_heads, to_sequence
from saggar.engine.attention.site import Streams
from saggar.engine.errors import Unsupported
from saggar.engine.parallel.mesh import Axis, share


def share_convolution(name: str, module: torch.nn.Module, stream: str, axis: Axis, streams: Streams) -> None:
    """Unsupported: it is neither of single pixels nor depthwise."""
    if not isinstance(module, torch.nn.Conv2d):
        raise Unsupported(f"the sequence plan does not apply: {name} is no convolution")
    if module.kernel_size == (1, 1):
        module.forward = lambda input: _pixels(module, input)  # type: ignore[method-assign]
    elif module.groups == module.in_channels == module.out_channels and module.stride == (1, 1):
        module.forward = lambda input: _depthwise(module, input, stream, axis, streams)  # type: ignore[method-assign]
    else:
        raise Unsupported(f"the sequence plan does not apply: {name} mixes pixels and channels at once")


def _pixels(module: torch.nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """[B, C, own rows, w]; a rank may have no row, which torch does not convolve."""
    if x.numel() == 0:
        return x.new_empty(x.shape[0], module.out_channels, *x.shape[2:])
    return F.conv2d(x, module.weight, module.bias)


def _depthwise(
    module: torch.nn.Conv2d, x: torch.Tensor, stream: str, axis: Axis, streams: Streams
) -> torch.Tensor:
    """[B, C, own rows, w] to the same shape."""
    batch, channels, rows, width = x.shape
    lengths = streams.shares(stream, axis.size)
    tokens = x.flatten(2).transpose(1, 2).unsqueeze(-1)
    whole = to_heads((tokens,), lengths, axis)[0]  # [B, all tokens, own channels, 1]
    grid = whole.squeeze(-1).transpose(1, 2).reshape(batch, whole.shape[2], -1, width)
    part = share(channels, axis)
    bias = None if module.bias is None else module.bias[part]
    out = F.conv2d(grid, module.weight[part], bias, padding=module.padding, groups=grid.shape[1])
    back = to_sequence(out.flatten(2).transpose(1, 2).unsqueeze(-1), lengths, channels, axis)
    return back.squeeze(-1).transpose(1, 2).reshape(batch, channels, rows, width)
