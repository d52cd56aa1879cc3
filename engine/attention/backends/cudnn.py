"""cuDNN's attention, through torch and nothing else: no other kernel takes its place unseen."""

from __future__ import annotations

import torch
from saggar.engine.attention.base import HALVES, Backend, Traits, by_torch, cudnn_lse
from torch.nn.attention import SDPBackend, sdpa_kernel


class Cudnn(Backend):
    """See the module."""

    name = "cudnn"
    traits = Traits(("cuda",), HALVES, (128, 8), mask="any", causal=True, lse=True, masked_lse=True)

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
        """The operator underneath."""
        return cudnn_lse(q, k, v, mask, scale)


KERNEL = Cudnn
