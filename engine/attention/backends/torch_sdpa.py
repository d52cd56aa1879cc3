"""torch's own attention, which picks a kernel by itself: on every device, with every mask."""

from __future__ import annotations

import torch
from saggar.engine.attention.base import FLOATS, HALVES, Backend, Traits, added, by_torch, cudnn_lse

_CUDNN = 128
"""Its widest heads."""


class TorchSdpa(Backend):
    """See the module."""

    name = "torch_sdpa"
    traits = Traits(
        ("cpu", "cuda"),
        FLOATS,
        (1 << 16, 1),
        mask="any",
        causal=True,
        lse=True,
        masked_lse=True,
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
        """Whatever kernel torch picks."""
        return by_torch(q, k, v, mask, causal, scale)

    def attend_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By the operators underneath, which give it. On a GPU: cuDNN's where it can, else flash, else the
        memory-efficient one.
        """
        if q.device.type == "cuda" and q.dtype in HALVES and q.shape[-1] <= _CUDNN and q.shape[-1] % 8 == 0:
            return cudnn_lse(q, k, v, mask, scale)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        bias = None if mask is None else added(mask, q)
        aten = torch.ops.aten
        if q.device.type == "cpu":
            if bias is not None:
                bias = bias.expand(q.shape[0], -1, -1, -1)
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, False, attn_mask=bias, scale=scale
            )
        elif bias is None and q.dtype != torch.float32:
            out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)[:2]
        else:
            if bias is not None:
                bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], -1)
            out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)[:2]
        return out.transpose(1, 2), lse[:, :, : q.shape[2]].float()


KERNEL = TorchSdpa
