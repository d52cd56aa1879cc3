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
    "all": ("tp", "ulysses", "ring", "pp", "cfg"),
}
"""Each axis and the degrees that it is made of; `sp`, who share one sequence, is two of them; `all` the whole group."""
_DEGREES = ("tp", "ulysses", "ring", "pp", "cfg")


@dataclass(frozen=True)
class Axis:
    """One rank's place along an axis: `index` of `size`. `group` is how they speak, None where the rank is alone.

    What the ranks send each other goes through torch's functional collectives: a compiled block passes them without a
    graph break, and what has been sent travels until it is waited for.
    """

    name: str
    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None
    called: str = ""
    """The group's name, by which the collectives find it."""

    def all_gather(self, sent: torch.Tensor) -> torch.Tensor:
        """What each rank sends, of equal shapes, one behind the other along the first dimension."""
        import torch

        gathered = torch.ops._c10d_functional.all_gather_into_tensor(sent, self.size, self.called)
        return arrived(gathered)

    def exchange(
        self, sent: torch.Tensor, received: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Begin to send a part of `sent`, cut along its first dimension, to each rank, and to receive one from each.

        Equal parts, or `sizes` of what is sent and `received` of what comes. The result is there after `arrived`.
        """
        import torch

        even = [sent.shape[0] // self.size] * self.size
        coming: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(
            sent.contiguous(), list(received or even), list(sizes or even), self.called
        )
        return coming


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
    all: Axis

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
                    called = "" if group is None else group.group_name
                    axes[name] = Axis(name, len(line), line.index(rank), group, called)
        return cls(degrees, **axes)

    @classmethod
    def alone(cls) -> Mesh:
        """Of a rank that shares its work with nobody."""
        return cls.of(Degrees(), 0, lambda ranks: None)


def arrived(coming: torch.Tensor) -> torch.Tensor:
    """What an exchange brings, once it is there: a device's stream waits, not the process."""
    import torch

    there: torch.Tensor = torch.ops._c10d_functional.wait_tensor(coming)
    return there


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
    least, rest = length // parts, length % parts  # a compiler follows these, and no divmod
    return tuple(least + (part < rest) for part in range(parts))


def share(length: int, axis: Axis) -> slice:
    """What of `length` things is this rank's along an axis."""
    sizes = shares(length, axis.size)
    start = sum(sizes[: axis.index])
    return slice(start, start + sizes[axis.index])
