"""xFormers' memory-efficient attention, which adds any mask to the scores."""

from __future__ import annotations

import importlib
import importlib.util
from typing import cast

import torch
from saggar.engine.attention.base import FLOATS, Backend, Traits, added


class Xformers(Backend):
    """See the module."""

    name = "xformers"
    traits = Traits(("cuda",), FLOATS, (256, 8), mask="any", causal=True, lse=True, masked_lse=True)

    @classmethod
    def missing(cls) -> str | None:
        """The package of its name, built for this torch: else it is there and none of its kernels loads."""
        if not importlib.util.find_spec("xformers"):
            return "pip install xformers"
        kernels = importlib.import_module("xformers.ops.fmha").ALL_FW_OPS
        if not any(kernel.is_available() for kernel in kernels):
            return f"the xformers here is built for another torch than {torch.__version__}"
        return None

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """Its layout is the seam's."""
        ops = importlib.import_module("xformers.ops")
        bias = ops.LowerTriangularMask() if causal else _bias(mask, q, k)
        return cast("torch.Tensor", ops.memory_efficient_attention(q, k, v, attn_bias=bias, scale=scale))

    def attend_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Its forward alone; some kernels round the log-sum-exp's length up."""
        ops = importlib.import_module("xformers.ops")
        out, lse = ops.memory_efficient_attention_forward_requires_grad(
            q, k, v, attn_bias=_bias(mask, q, k), scale=scale
        )
        return out, lse[:, :, : q.shape[1]].float()


def _bias(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """As large as the scores; the kernel wants rows that begin at multiples of 8 values."""
    if mask is None:
        return None
    keys = k.shape[1]
    bias = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], -(-keys // 8) * 8)
    bias[..., :keys] = added(mask, q)
    return bias[..., :keys]


KERNEL = Xformers
