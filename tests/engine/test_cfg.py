"""Which rows of a step each rank of the cfg axis predicts, without any process."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saggar.engine import open_family
from saggar.engine.parallel.mesh import Axis, share
from saggar.engine.platform.base import Placement

from tests.engine.support import noop


class Recorded:
    """One rank of several: what it was given stands for what the others predict too."""

    def __init__(self, ranks: int, index: int) -> None:
        self.axis = Axis("cfg", ranks, index)
        self.parts: list[int] = []

    def mine(self, rows: int) -> slice:
        return share(rows, self.axis)

    def gather(
        self, part: Any, rows: int, join: Callable[[Sequence[Any]], Any], shape_key: Hashable
    ) -> np.ndarray:
        self.parts.append(0 if part is None else len(part))
        return np.zeros((rows, 3), np.float32)


@pytest.mark.parametrize(
    ("guided", "unguided", "ranks", "rows"),
    [
        (2, 0, 2, [2, 2]),  # a branch each
        (0, 4, 2, [2, 2]),  # no branch to share: rows
        (1, 3, 2, [3, 2]),
        (2, 1, 4, [2, 1, 1, 1]),
        (0, 1, 2, [1, 0]),  # fewer rows than ranks
    ],
)
def test_no_rank_idles_while_there_are_rows(
    models: Callable[[str], Path], guided: int, unguided: int, ranks: int, rows: list[int]
) -> None:
    requests = [noop(f"g{i}", guidance_scale=4.0) for i in range(guided)]
    requests += [noop(f"u{i}") for i in range(unguided)]
    counted, branches = [], []
    for index in range(ranks):
        family = open_family(str(models("noop")))
        family.load(Placement("uint8", "exact"))
        spread = Recorded(ranks, index)
        family.spread = spread
        states = [family.new_state(family.validate(request)) for request in requests]
        family.prepare_encode(states)
        assert set(family.denoise_step(states, 8)) == {request.id for request in requests}
        counted += spread.parts
        branches.append({name: count for name, count in family.counters.items() if "rows." in name})
    assert counted == rows
    assert sum(found.get("rows.uncond", 0) for found in branches) == guided
    assert sum(found.get("rows.cond", 0) for found in branches) == guided + unguided
