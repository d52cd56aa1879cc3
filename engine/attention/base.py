"""What an attention site is, and what a kernel says of itself.

Shapes: q [B, Lq, H, D], k and v [B, Lk, H, D], out [B, Lq, H, D], log-sum-exp [B, H, Lq] in float32. Masks are boolean
(True: attended) or added to the scores, of shape [B, 1 or H, 1 or Lq, Lk]; see `mask_of`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from saggar.engine.choices import OptionValue
from saggar.engine.errors import Unsupported

MaskKind = Literal["none", "keys", "any"]
"""`keys`: boolean and the same for all queries. `any`: also added to the scores, and different by query."""
HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALVES)


@dataclass(frozen=True)
class Traits:
    """What a kernel bears. `head_dims`: the largest, and what it must be a multiple of; `widths`: the only ones, where
    they are so few; `narrowest_on_gpu`: the least there. `lse`: it gives the log-sum-exp, which Ring needs;
    `masked_lse`: under a mask too.
    """

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, int]
    mask: MaskKind
    causal: bool
    lse: bool
    masked_lse: bool
    widths: tuple[int, ...] = ()
    narrowest_on_gpu: int = 1

    def refusal(self, need: Need) -> str | None:
        """Why a site that needs this cannot be served, None if it can."""
        if need.device not in self.devices:
            return f"it runs on {', '.join(self.devices)}, not on {need.device}"
        if need.dtype not in self.dtypes:
            return f"it knows {', '.join(map(_short, self.dtypes))}, not {_short(need.dtype)}"
        if (fits := self._too_narrow_or_wide(need)) is not None:
            return f"heads are {fits}, not {need.head_dim}"
        order = ("none", "keys", "any")
        if order.index(need.mask) > order.index(self.mask):
            return f"its masks are {self.mask!r} and the site's are {need.mask!r}"
        if need.lse and not (self.masked_lse if need.mask != "none" else self.lse):
            return "Ring needs its log-sum-exp and it gives none" + (" under a mask" if self.lse else "")
        return None

    def _too_narrow_or_wide(self, need: Need) -> str | None:
        """What heads it takes, if not these."""
        largest, step = self.head_dims
        if self.widths and need.head_dim not in self.widths:
            return f"{list(self.widths)} wide"
        if need.head_dim > largest or need.head_dim % step:
            return f"at most {largest} wide and a multiple of {step}"
        if need.device == "cuda" and need.head_dim < self.narrowest_on_gpu:
            return f"at least {self.narrowest_on_gpu} wide on a GPU"
        return None


@dataclass(frozen=True)
class Need:
    """What a site asks of its kernel."""

    device: str
    dtype: torch.dtype
    head_dim: int
    mask: MaskKind = "none"
    lse: bool = False


@dataclass(frozen=True)
class NoOptions:
    """A kernel without any."""


class Backend(ABC):
    """A kernel with its options. One file each in `backends/`, named as the kernel is, with its class in KERNEL."""

    name: ClassVar[str]
    traits: ClassVar[Traits]
    Options: ClassVar[type] = NoOptions
    approximates: ClassVar[bool] = False
    """Its results differ from exact attention by more than rounding."""

    def __init__(self, options: Mapping[str, OptionValue] | None = None) -> None:
        self.options = self._checked(options or {})

    @property
    def label(self) -> str:
        """Its name, with the options that were changed: `sage:smooth_k=False`."""
        usual = type(self.options)()
        changed = {name: value for name, value in vars(self.options).items() if value != getattr(usual, name)}
        return ":".join([self.name, *(f"{name}={value}" for name, value in sorted(changed.items()))])

    @classmethod
    def missing(cls) -> str | None:
        """What has to be installed first, None if nothing."""
        return None

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        causal: bool = False,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Attention. Unsupported: this kernel cannot take the mask; it is never left out."""
        if q.numel() == 0:
            return q.new_empty(q.shape)
        self._check(mask, causal)
        return self.attend(q, k, v, mask, causal, scale)

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """Attention of at least one query."""

    def run_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention and its log-sum-exp. Without any key the sum is empty: its logarithm is -inf, the output 0."""
        if k.shape[1] == 0 or q.numel() == 0:
            empty = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32)
            return torch.zeros_like(q), empty
        self._check(mask, False)
        return self.attend_lse(q, k, v, mask, scale)

    def attend_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with the log-sum-exp, for kernels that give it."""
        raise Unsupported(f"attention {self.name} gives no log-sum-exp")

    def _check(self, mask: torch.Tensor | None, causal: bool) -> None:
        if mask is not None and self.traits.mask != "any":
            by_key = mask.dtype == torch.bool and mask.shape[1] == mask.shape[2] == 1
            if self.traits.mask == "none" or not by_key:
                raise Unsupported(
                    f"attention {self.name} cannot take a mask {_short(mask.dtype)} {list(mask.shape)}"
                )
        if causal and not self.traits.causal:
            raise Unsupported(f"attention {self.name} cannot be causal")

    def _checked(self, options: Mapping[str, OptionValue]) -> object:
        known = {field.name: field.type for field in dataclasses.fields(self.Options)}
        for name, value in options.items():
            if name not in known:
                listed = ", ".join(known) or "none"
                raise Unsupported(f"attention {self.name} has no option {name!r}; there are {listed}")
            if type(value).__name__ not in str(known[name]):
                raise Unsupported(f"attention {self.name}: {name} is a {known[name]}, not {value!r}")
        return self.Options(**options)


def mask_of(mask: torch.Tensor | None, keys: int) -> torch.Tensor | None:
    """A mask of any usual form as [B, 1 or H, 1 or Lq, Lk]: [B, Lk], [B, 1 or Lq, Lk] or of four dimensions already."""
    if mask is None:
        return None
    assert mask.shape[-1] == keys, f"a mask of {mask.shape[-1]} keys for {keys}"
    if mask.ndim == 2:
        return mask[:, None, None, :]
    return mask[:, None] if mask.ndim == 3 else mask


def added(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A mask to be added to the scores, in the dtype of `like`. Finite, so that a chunk of keys that is masked as a
    whole has a log-sum-exp and not a NaN.
    """
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    zero = torch.zeros((), dtype=like.dtype, device=mask.device)
    return torch.where(mask, zero, zero + torch.finfo(like.dtype).min / 2)


def by_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """torch's scaled_dot_product_attention on [B, S, H, D]; fewer heads of keys than of queries are shared by them."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    shared = k.shape[1] != q.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=shared
    )
    return out.transpose(1, 2)


def cudnn_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cuDNN's attention on [B, S, H, D] with its log-sum-exp, by torch's operator underneath: some versions give it a
    last dimension of 1.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    bias = None if mask is None else added(mask, q).expand(q.shape[0], q.shape[1], q.shape[2], -1)
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, scale=scale)
    lse = found[1].squeeze(-1) if found[1].ndim == 4 else found[1]
    return found[0].transpose(1, 2), lse.float()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
