"""CFG parallel: the ranks of an axis share the rows of a step, and each learns the predictions of all.

Rows stand branch by branch, and each rank takes an equal run of them: with two branches and two ranks one branch each,
with three branches one each for three; where some rows have no guidance the border lies elsewhere, so that none idles
as long as there are as many rows as ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from saggar.engine.errors import Unsupported
from saggar.engine.parallel.mesh import Axis, share

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_REMEMBERED = 256


class Spread(Protocol[T]):
    """How the rows of a step are spread over ranks."""

    def mine(self, rows: int) -> slice:
        """This rank's run of so many rows."""

    def gather(self, part: T | None, rows: int, join: Callable[[Sequence[T]], T], shape_key: Hashable) -> T:
        """The predictions of all rows, in their order, from this rank's (None: it had no row).

        `shape_key` decides the shapes of all parts: ranks tell each other theirs once for each.
        """


class Alone(Generic[T]):
    """No other rank: all rows are its own."""

    def mine(self, rows: int) -> slice:
        """All."""
        return slice(0, rows)

    def gather(self, part: T | None, rows: int, join: Callable[[Sequence[T]], T], shape_key: Hashable) -> T:
        """What it predicted."""
        assert part is not None
        return part


class OverRanks:
    """Over the ranks of an axis, in tensors. Shapes are remembered, so that a usual step waits for no device."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._axis = axis
        self._device = device
        self._shapes: dict[Hashable, list[tuple[tuple[int, ...], torch.dtype] | None]] = {}

    def mine(self, rows: int) -> slice:
        """An equal run."""
        return share(rows, self._axis)

    def gather(
        self,
        part: torch.Tensor | None,
        rows: int,
        join: Callable[[Sequence[torch.Tensor]], torch.Tensor],
        shape_key: Hashable,
    ) -> torch.Tensor:
        """Parts may differ in every dimension: they travel flat, filled up to the largest.

        Unsupported: the family predicts something else than one tensor.
        """
        import torch

        if part is not None and not isinstance(part, torch.Tensor):
            raise Unsupported(f"cfg parallel knows tensors, not {type(part).__name__}")
        shapes = self._shapes_of(part, shape_key)
        known = [shape for shape in shapes if shape is not None]
        longest = max(torch.Size(size).numel() for size, _ in known)
        dtype = known[0][1]
        mine = torch.zeros(longest, dtype=dtype, device=self._device)
        if part is not None:
            mine[: part.numel()] = part.reshape(-1)
        whole = self._axis.all_gather(mine)
        pieces = [
            flat[: torch.Size(shape[0]).numel()].view(shape[0])
            for flat, shape in zip(whole.view(self._axis.size, longest), shapes, strict=True)
            if shape is not None
        ]
        found = join(pieces)
        assert len(found) == rows, f"{len(found)} predictions for {rows} rows"
        return found

    def _shapes_of(
        self, part: torch.Tensor | None, key: Hashable
    ) -> list[tuple[tuple[int, ...], torch.dtype] | None]:
        import torch.distributed as dist

        if key not in self._shapes:
            mine = None if part is None else (tuple(part.shape), part.dtype)
            told: list[tuple[tuple[int, ...], torch.dtype] | None] = [None] * self._axis.size
            dist.all_gather_object(told, mine, group=self._axis.group)
            if len(self._shapes) >= _REMEMBERED:  # all ranks forget at the same step
                self._shapes.clear()
            self._shapes[key] = told
        return self._shapes[key]
