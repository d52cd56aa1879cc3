"""How diffusers' denoisers reach our sites. Here alone are private names of diffusers about attention.

Processors of the new kind call `dispatch_attention_fn` and hand it two slots, a kernel's name and a parallel
configuration: the first gets the name of our function, the second carries the Site. Processors of the old kind call
torch themselves: they are replaced (processors.py). diffusers' registry of kernels gets one entry for each kernel with
its options, because some processors leave the second slot empty where nothing is shared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from saggar.engine.attention.base import Backend
from saggar.engine.attention.processors import REPLACED, SEAMLESS, Linear
from saggar.engine.attention.site import Site, attend
from saggar.engine.parallel.mesh import Axis

_ARGUMENTS = (
    "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "_parallel_config",
)  # fmt: skip
_CROSS = {"attn2", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn"}
"""Names of attentions to another sequence, for modules that do not say what they are."""


@dataclass(frozen=True)
class Found:
    """An attention module of a denoiser: its path, role, width of a head; `reachable`: a Site can be put on it."""

    name: str
    role: str
    head_dim: int
    module: torch.nn.Module
    reachable: bool


def find_sites(denoiser: torch.nn.Module) -> list[Found]:
    """Its attention modules, those of linear attention left out: no kernel is for them."""
    found = []
    for name, module in denoiser.named_modules():
        processor = getattr(module, "processor", None)
        if processor is None or type(processor).__name__ in SEAMLESS:
            continue
        reachable = type(processor).__name__ in REPLACED or hasattr(type(processor), "_attention_backend")
        found.append(Found(name, _role(name, module), _head_dim(module), module, reachable))
    return found


def install(found: Found, site: Site) -> None:
    """Put a site on its module."""
    module: Any = found.module
    own = REPLACED.get(type(module.processor).__name__)
    if own is not None:
        module.set_processor(own(site))
        return
    processor = copy.copy(module.processor)  # one may serve several modules
    processor._attention_backend = _registered(site.backend)
    processor._parallel_config = site
    module.processor = processor


def share_linear(denoiser: torch.nn.Module, axis: Axis) -> None:
    """Its linear attentions sum over the ranks of an axis."""
    for module in denoiser.modules():
        if type(getattr(module, "processor", None)).__name__ in SEAMLESS:
            cast("Any", module).set_processor(Linear(axis))


def _role(name: str, module: Any) -> str:
    if "refiner" in name:
        return "refiner"
    if getattr(module, "is_cross_attention", name.rpartition(".")[2] in _CROSS):
        return "cross"
    return "self" if getattr(module, "added_kv_proj_dim", None) is None else "joint"


def _head_dim(module: Any) -> int:
    if hasattr(module, "head_dim"):
        return int(module.head_dim)
    return int(module.inner_dim) // int(module.heads)


def _registered(backend: Backend) -> AttentionBackendName:
    """The name by which diffusers calls this kernel: a member that its enumeration does not list."""
    name = f"saggar {backend.name} {backend.options}"
    for known in _AttentionBackendRegistry._backends:
        if known.value == name:
            return known
    member = str.__new__(AttentionBackendName, name)
    member._name_, member._value_ = name, name
    _AttentionBackendRegistry._backends[member] = _function(backend)
    _AttentionBackendRegistry._constraints[member] = []
    _AttentionBackendRegistry._supported_arg_names[member] = set(_ARGUMENTS)
    return member


def _function(backend: Backend) -> Callable[..., torch.Tensor]:
    nowhere = Site("a site without a slot", "self", backend)

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        _parallel_config: Site | None = None,
    ) -> torch.Tensor:
        return attend(_parallel_config or nowhere, query, key, value, attn_mask, is_causal, scale)

    return attention
