"""In how many ways the ranks of one group share a batch's work, and what goes together. No torch.

A degree is the number of ranks along one axis; their product is the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod

from saggar.engine.errors import Unsupported

COMBINATIONS = """\
                   ulysses  ring   cfg    replicas  ranks alone
ulysses            -        yes    yes    yes       no
ring               yes      -      yes    yes       no
cfg                yes      yes    -      yes       no
executor=local     no       no     no     yes       no
no sequence plan   no       no     yes    yes       no
diffusers-any      no       no     no     yes       no
no torch           no       no     no     yes       yes"""
"""What may be set beside what. `ranks alone`: several ranks that all do the same."""


@dataclass(frozen=True)
class Degrees:
    """Ranks along each axis, the fastest axis first: neighbours in it have neighbouring numbers.

    tp and pp (tensor and pipeline parallel) are 1: nothing sets them yet.
    """

    tp: int = 1
    ulysses: int = 1
    ring: int = 1
    pp: int = 1
    cfg: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise Unsupported(f"{name} must be at least 1, not {value}")

    @property
    def size(self) -> int:
        """Ranks in all."""
        return prod(vars(self).values())

    @property
    def sequence(self) -> int:
        """Ranks that share one sequence."""
        return self.ulysses * self.ring

    def __str__(self) -> str:
        """Such as `ulysses=2 × cfg=2`; `no degree` where all are 1."""
        set_ones = [f"{field.name}={getattr(self, field.name)}" for field in fields(self)]
        return " × ".join(name for name in set_ones if not name.endswith("=1")) or "no degree"

    def check_ranks(self, ranks: int) -> None:
        """Unsupported: so many ranks are not what the degrees make; the line says what would fit."""
        if self.size in (1, ranks):
            return
        fitting = [f"{name}={ranks}" for name in ("ulysses", "ring", "cfg")]
        fitting += [f"ulysses={ranks // 2} × cfg=2"] if ranks % 2 == 0 and ranks > 2 else []
        raise Unsupported(
            f"ranks={ranks} does not fit {self}, which makes {self.size}: leave ranks out, or set "
            f"{', or '.join(fitting)}"
        )


def refuse(reason: str) -> Unsupported:
    """The error of a combination that does not work, with the table of those that do."""
    return Unsupported(f"{reason}. What goes together:\n{COMBINATIONS}")
