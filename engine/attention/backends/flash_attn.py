"""FlashAttention: version 3 from `flash_attn_interface` or `fa3_fwd_interface`, else version 2 from `flash_attn`.

A boolean mask of keys is not added to scores: keys that are masked are left out, and rows of unlike lengths stand one
behind the other (varlen).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, cast

import torch
from saggar.engine.attention.base import HALVES, Backend, Traits
from saggar.engine.errors import Unsupported

MODULES = {3: ("flash_attn_interface", "fa3_fwd_interface"), 2: ("flash_attn",)}


@dataclass(frozen=True)
class FlashOptions:
    """version: 2 or 3, 0: the newest that is installed."""

    version: int = 0


class FlashAttn(Backend):
    """See the module."""

    name = "flash_attn"
    traits = Traits(("cuda",), HALVES, (256, 8), mask="keys", causal=True, lse=True, masked_lse=False)
    Options = FlashOptions

    @classmethod
    def missing(cls) -> str | None:
        """flash-attn has no wheels; fa3-fwd has."""
        found = [name for names in MODULES.values() for name in names if importlib.util.find_spec(name)]
        return None if found else "pip install fa3-fwd (Hopper), or flash-attn with its CUDA sources"

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """Unsupported: the version that was chosen is not installed."""
        module = self._module()[1]
        if mask is not None:
            return self._varlen(module, q, k, v, mask[:, 0, 0], scale)
        return _first(module.flash_attn_func(q, k, v, softmax_scale=scale, causal=causal))

    def attend_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The word for it differs by version; early ones of version 3 give it always."""
        function = self._module()[1].flash_attn_func
        words = inspect.signature(function).parameters
        asked = {word: True for word in ("return_attn_probs", "return_softmax_lse") if word in words}
        found = function(q, k, v, softmax_scale=scale, causal=False, **asked)
        return cast("torch.Tensor", found[0]), cast("torch.Tensor", found[1]).float()

    def _varlen(
        self,
        module: ModuleType,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kept: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        """`kept`: [B, Lk]. Counting the keys of each row waits for the device once."""
        batch, length = q.shape[:2]
        keys = kept.sum(1, dtype=torch.int32)
        ends = torch.nn.functional.pad(keys.cumsum(0, dtype=torch.int32), (1, 0))
        queries = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
        out = module.flash_attn_varlen_func(
            q.flatten(0, 1), k[kept], v[kept],
            cu_seqlens_q=queries, cu_seqlens_k=ends, max_seqlen_q=length, max_seqlen_k=int(keys.max()),
            softmax_scale=scale, causal=False,
        )  # fmt: skip
        return torch.unflatten(_first(out), 0, (batch, length))

    def _module(self) -> tuple[Literal[2, 3], ModuleType]:
        wanted = cast("FlashOptions", self.options).version
        versions: tuple[Literal[2, 3], ...] = (3, 2)
        for version in versions:
            for name in MODULES[version] if wanted in (0, version) else ():
                if importlib.util.find_spec(name):
                    return version, importlib.import_module(name)
        raise Unsupported(f"attention flash_attn: version {wanted or '2 or 3'} is not installed")


def _first(found: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Some versions give more than the output."""
    return found[0] if isinstance(found, tuple) else found


KERNEL = FlashAttn
