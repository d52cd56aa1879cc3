"""A request inside a rank: `RequestState` is what the verbs of a family fill, read and advance.

T is the array type: torch.Tensor, or numpy's ndarray for the no-op family. Latents have shape [outputs, ...].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from saggar.engine.request import Request, TextCut

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
P = TypeVar("P")
S = TypeVar("S")


@dataclass
class RequestState(Generic[T, P, S]):
    """`params` is the family's data class, `sampler` this request's own; `timesteps` has one value a step.

    `conditioning` holds for each branch its tensors by name, of shape [1, ...]: all outputs of a request
    share them. `generators[i]` draws the noise of output i. `finite` says after each step whether the
    latents were. `extras` are tensors that all branches share. `unread`: by field, the texts of which the
    encoders do not read all.
    """

    request: Request
    params: P
    sampler: S | None = None
    latents: T | None = None
    timesteps: Sequence[float] | torch.Tensor = ()
    step_index: int = 0
    conditioning: dict[str, Mapping[str, T]] = field(default_factory=dict)
    extras: dict[str, T] = field(default_factory=dict)
    generators: list[torch.Generator] = field(default_factory=list)
    finite: list[object] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    unread: dict[str, TextCut] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def steps(self) -> int:
        """Steps in all; 0 before encoding."""
        return len(self.timesteps)

    @property
    def finished(self) -> bool:
        """No step is left."""
        return self.step_index >= self.steps


@dataclass(frozen=True)
class Row(Generic[T, P, S]):
    """One output of one request: a row of a forward."""

    state: RequestState[T, P, S]
    index: int

    def cond(self, branch: str, name: str) -> T:
        """The row's conditioning tensor, of shape [1, ...]."""
        return self.state.conditioning[branch][name]
