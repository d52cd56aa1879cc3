"""Ranks by axis, and shares of anything."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from saggar.engine.degrees import Degrees
from saggar.engine.parallel.mesh import AXES, Mesh, lines, share, shares

DEGREES = st.builds(Degrees, *(st.integers(1, 3) for _ in range(5)))


def test_the_fastest_axis_has_neighbours() -> None:
    degrees = Degrees(ulysses=2, ring=2, cfg=2)
    assert lines(degrees, "ulysses") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert lines(degrees, "ring") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert lines(degrees, "sp") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert lines(degrees, "cfg") == [(0, 4), (1, 5), (2, 6), (3, 7)]


@settings(deadline=None, max_examples=30)
@given(DEGREES)
def test_every_rank_stands_on_one_line_of_each_axis(degrees: Degrees) -> None:
    for name, parts in AXES.items():
        found = lines(degrees, name)
        assert sorted(rank for line in found for rank in line) == list(range(degrees.size))
        assert {len(line) for line in found} == {prod(getattr(degrees, part) for part in parts)}


@settings(deadline=None, max_examples=30)
@given(DEGREES)
def test_all_ranks_make_the_same_groups_in_the_same_order(degrees: Degrees) -> None:
    asked: list[list[tuple[int, ...]]] = []
    for rank in range(degrees.size):
        asked.append([])

        def new_group(ranks: Sequence[int], seen: list[tuple[int, ...]] = asked[-1]) -> Any:
            seen.append(tuple(ranks))
            return SimpleNamespace(ranks=tuple(ranks), group_name=str(ranks))

        mesh = Mesh.of(degrees, rank, new_group)
        for name in AXES:
            axis = getattr(mesh, name)
            assert axis.group is None if axis.size == 1 else axis.group.ranks[axis.index] == rank
    assert all(groups == asked[0] for groups in asked)


@pytest.mark.parametrize(
    ("length", "parts", "sizes"), [(7, 2, (4, 3)), (3, 2, (2, 1)), (2, 4, (1, 1, 0, 0)), (8, 4, (2, 2, 2, 2))]
)
def test_shares(length: int, parts: int, sizes: tuple[int, ...]) -> None:
    assert shares(length, parts) == sizes


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(1, 9))
def test_shares_are_everything_once(length: int, parts: int) -> None:
    axes = [Mesh.of(Degrees(cfg=parts), rank, lambda ranks: None).cfg for rank in range(parts)]
    assert [i for axis in axes for i in range(length)[share(length, axis)]] == list(range(length))
