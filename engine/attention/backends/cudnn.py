"""cuDNN's attention, through torch and nothing else: no other kernel takes its place unseen."""

from __future__ import annotations

import torch
from saggar.engine.attention.base import HALVES, Backend, Traits, added, by_torch
from torch.nn.attention import SDPBackend, sdpa_kernel


class Cudnn(Backend):
    """See the module."""

    name = "cudnn"
    traits = Traits(
        ("cuda",), HALVES, (128, 8), mask="any", causal=True, lse=True, masked_lse=True, varlen=False
    )

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """torch raises where cuDNN has no plan for the shape."""
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return by_torch(q, k, v, mask, causal, scale)

    def attend_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The operator underneath; some versions give the log-sum-exp a last dimension of 1."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        bias = None if mask is None else added(mask, q).expand(q.shape[0], q.shape[1], q.shape[2], -1)
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, scale=scale)
        lse = found[1].squeeze(-1) if found[1].ndim == 4 else found[1]
        return found[0].transpose(1, 2), lse.float()


KERNEL = Cudnn
