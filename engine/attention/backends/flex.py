"""torch's FlexAttention: the mask becomes a function of scores that is compiled into the kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from saggar.engine.attention.base import FLOATS, Backend, Traits, added
from torch.nn.attention.flex_attention import AuxRequest, flex_attention


class Flex(Backend):
    """See the module. Without a compiler it is as slow as the textbook's attention."""

    name = "flex"
    traits = Traits(
        ("cuda", "cpu"),
        FLOATS,
        (256, 1),
        mask="any",
        causal=True,
        lse=True,
        masked_lse=True,
        narrowest_on_gpu=16,
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
        """The scores' function adds the mask, or cuts off what comes later."""
        return self._call(q, k, v, _score_of(mask, causal, q), scale)[0]

    def attend_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """It gives the log-sum-exp where it is asked for."""
        return self._call(q, k, v, _score_of(mask, False, q), scale)

    def _call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Any, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        function = _compiled() if q.device.type == "cuda" else flex_attention
        out, more = function(
            q, k, v, score_mod=score, scale=scale, enable_gqa=k.shape[1] != q.shape[1],
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        return cast("torch.Tensor", out).transpose(1, 2), cast("torch.Tensor", more.lse).float()


def _score_of(mask: torch.Tensor | None, causal: bool, q: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    if causal:
        return lambda score, b, h, i, j: torch.where(i >= j, score, torch.finfo(score.dtype).min / 2)
    if mask is None:
        return None
    bias = added(mask, q)
    own_heads, own_queries = bias.shape[1] > 1, bias.shape[2] > 1
    bias = bias.expand(q.shape[0], -1, -1, -1)

    def add(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor
    ) -> torch.Tensor:
        return score + bias[b, h if own_heads else 0, i if own_queries else 0, j]

    return add


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


KERNEL = Flex
