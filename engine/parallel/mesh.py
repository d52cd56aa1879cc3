"""The ranks of one group as a grid: who shares what with whom. Passed by hand; nothing here is global.

Importing this imports no torch. A rank's number counts through the axes from the fastest, `tp`, to the slowest,
`cfg`: ranks that speak most with each other are neighbours, and so are their devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from saggar.engine.degrees import Degrees

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

AXES: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "ulysses": ("ulysses",),
    "ring": ("ring",),
    "sp": ("ulysses", "ring"),
    "pp": ("pp",),
    "cfg": ("cfg",),
}
"""Each axis and the degrees that it is made of; `sp`, who share one sequence, is two of them."""
_DEGREES = ("tp", "ulysses", "ring", "pp", "cfg")


@dataclass(frozen=True)
class Axis:
    """One rank's place along an axis: `index` of `size`. `group` is how they speak, None where the rank is alone."""

    name: str
    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """What each rank sends, of equal shapes, one behind the other along the first dimension of `received`."""
        import torch.distributed as dist

        # torch 2.13 renamed it.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(received, sent, group=self.group)


@dataclass(frozen=True)
class Mesh:
    """The axes of one rank."""

    degrees: Degrees
    tp: Axis
    ulysses: Axis
    ring: Axis
    sp: Axis
    pp: Axis
    cfg: Axis

    @classmethod
    def of(
        cls, degrees: Degrees, rank: int, new_group: Callable[[Sequence[int]], dist.ProcessGroup | None]
    ) -> Mesh:
        """The mesh of a rank. `new_group` is called for each line of ranks of each axis that has more than one,
        those without this rank too, in the same order in all ranks: making a group takes all of them.
        """
        axes = {}
        for name in AXES:
            axes[name] = Axis(name)
            for line in lines(degrees, name):
                group = new_group(line) if len(line) > 1 else None
                if rank in line:
                    axes[name] = Axis(name, len(line), line.index(rank), group)
        return cls(degrees, **axes)

    @classmethod
    def alone(cls) -> Mesh:
        """Of a rank that shares its work with nobody."""
        return cls.of(Degrees(), 0, lambda ranks: None)


def lines(degrees: Degrees, axis: str) -> list[tuple[int, ...]]:
    """The ranks of each line along an axis, in their order on it."""
    strides, stride = {}, 1
    for name in _DEGREES:
        strides[name] = stride
        stride *= getattr(degrees, name)
    along = AXES[axis]
    across = [name for name in _DEGREES if name not in along]

    def offsets(names: Sequence[str]) -> list[int]:
        # The first name is the fastest, and itertools counts its last one fastest.
        slowest_first = list(reversed(names))
        places = product(*(range(getattr(degrees, name)) for name in slowest_first))
        return [
            sum(at * strides[name] for name, at in zip(slowest_first, place, strict=True)) for place in places
        ]

    return [tuple(first + step for step in offsets(along)) for first in offsets(across)]


def shares(length: int, parts: int) -> tuple[int, ...]:
    """How many of `length` things each of `parts` gets: as even as can be, the first ones get the rest."""
    least, rest = divmod(length, parts)
    return tuple(least + (part < rest) for part in range(parts))


def share(length: int, axis: Axis) -> slice:
    """What of `length` things is this rank's along an axis."""
    sizes = shares(length, axis.size)
    start = sum(sizes[: axis.index])
    return slice(start, start + sizes[axis.index])
