"""SageAttention: products of 8-bit integers. It takes no mask; its results differ from the others' by about 1e-2.

Version 1 gives no log-sum-exp, whatever it is asked, knows three widths of heads, and smooths the keys in place.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from saggar.engine.attention.base import HALVES, Backend, Traits
from saggar.engine.choices import OptionValue


@dataclass(frozen=True)
class SageOptions:
    """smooth_k: subtract the keys' mean over the sequence before they are rounded."""

    smooth_k: bool = True


class Sage(Backend):
    """See the module."""

    name = "sage"
    traits = Traits(("cuda",), HALVES, (128, 8), mask="none", causal=True, lse=True, masked_lse=False)
    Options = SageOptions
    approximates = True

    def __init__(self, options: Mapping[str, OptionValue] | None = None) -> None:
        super().__init__(options)
        self._first_version = self.missing() is None and "return_lse" not in _words()
        if self._first_version:
            self.traits = replace(type(self).traits, lse=False, widths=(64, 96, 128))  # type: ignore[misc]

    @classmethod
    def missing(cls) -> str | None:
        """The package of its name."""
        return None if importlib.util.find_spec("sageattention") else "pip install sageattention"

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """sageattn with the layout that the seam has."""
        return cast("torch.Tensor", self._call(q, k, v, causal, scale, lse=False))

    def attend_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, asked for more."""
        out, lse = cast("tuple[torch.Tensor, torch.Tensor]", self._call(q, k, v, False, scale, lse=True))
        return out, lse.float()

    def _call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, lse: bool
    ) -> object:
        function = importlib.import_module("sageattention").sageattn
        smooth = cast("SageOptions", self.options).smooth_k
        asked = {} if self._first_version else {"return_lse": lse}
        k = k.clone() if self._first_version and smooth else k
        return function(
            q, k, v, tensor_layout="NHD", is_causal=causal, sm_scale=scale, smooth_k=smooth, **asked
        )


def _words() -> Collection[str]:
    return inspect.signature(importlib.import_module("sageattention").sageattn).parameters


KERNEL = Sage
