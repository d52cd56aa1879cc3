"""Sequence plans: tables that say where a denoiser's tensors are cut over ranks, and where they are whole again.

A family's plan is a table of ours, or diffusers' own (`_cp_plan`, a private name that is read here alone). Importing
this imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from saggar.engine.errors import Unsupported

if TYPE_CHECKING:
    import torch

_STREAMS = {"hidden_states": "image", "encoder_hidden_states": "text"}


@dataclass(frozen=True)
class Split:
    """Cut a tensor along `dim`, if it has `dims` dimensions or those do not matter; of a number a rank gets its share.
    `stream`: its length there is that of this stream, for sites and for gathering. `unit`: the parameter that says how
    many tokens stay together.
    """

    dim: int
    dims: int | None = None
    stream: str | None = None
    unit: str | None = None


@dataclass(frozen=True)
class Gather:
    """Make an output whole along `dim`, as long as the stream is."""

    dim: int
    stream: str = "image"


@dataclass(frozen=True)
class SequencePlan:
    """Modules are named by their path in the denoiser, `*` stands for one part of it and `""` for the denoiser.

    splits: of a module its parameters by name, or its outputs by number. gathers: of a module its output. wholes: of a
    module the parameters by name that it needs whole of a stream that is cut.
    sites: the streams that an attention module attends to in parts; none where a rank has all its keys whole.
    convolutions: those that work on a stream in parts. theirs: splits and gathers are diffusers' own.
    """

    sites: Mapping[str, tuple[str, ...]]
    splits: Mapping[str, Mapping[str | int, Split]] = field(default_factory=dict)
    gathers: Mapping[str, Gather] = field(default_factory=dict)
    wholes: Mapping[str, Mapping[str, Gather]] = field(default_factory=dict)
    convolutions: Mapping[str, str] = field(default_factory=dict)
    theirs: bool = False

    def of(self, denoiser: torch.nn.Module) -> SequencePlan:
        """With diffusers' table read from the denoiser's class. Unsupported: it has none."""
        if not self.theirs:
            return self
        table = getattr(type(denoiser), "_cp_plan", None)
        if not table:
            raise Unsupported(
                f"the sequence plan does not apply: {type(denoiser).__name__} has none of its own"
            )
        splits: dict[str, Mapping[str | int, Split]] = {}
        gathers: dict[str, Gather] = {}
        for name, entry in table.items():
            if isinstance(entry, Mapping):
                splits[name] = {key: _split(key, one) for key, one in entry.items()}
            else:
                gathers[name] = Gather(entry.gather_dim)
        return SequencePlan(self.sites, splits, gathers)


def _split(key: str | int, entry: Any) -> Split:
    """From diffusers' words."""
    stream = _STREAMS.get(str(key)) if entry.expected_dims == 3 else None
    return Split(entry.split_dim, entry.expected_dims, stream)


def matches(pattern: str, name: str) -> bool:
    """Whether a module's path is meant."""
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(a in ("*", b) for a, b in zip(wanted, parts, strict=True))
