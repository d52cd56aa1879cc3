"""Who starts, extends or forgets a run: killed at any call, or at the same moment as somebody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from saggar.jobs.errors import RunBusy, RunChanged, UnknownRun
from saggar.storage.errors import StorageUnavailable

from tests.workers.runs.test_deaths import CASES, differences, rows, small, undisturbed
from tests.workers.runs.trap import Killed, Trap, What
from tests.workers.runs.world import NAME, Case, World

pytestmark = pytest.mark.e2e
_small = small
AWAY_WHATS: tuple[What, ...] = ("refused", "killed before", "lost", "killed after")
EACH = 3
"""Every so many calls, and each thing that happens begins at another one: all are tried by one or another."""
AWAY = (redis.ConnectionError, StorageUnavailable, Killed)
PLAIN = Case(rows=rows(4), spec={"format": "webdataset", "shard_count": 3})
LONGER = [*rows(4), *rows(3, 10)]
OTHER = rows(5, 20)


@pytest.fixture
def world(redis_url: str, tmp_path: Path) -> Iterator[World]:
    world = World(PLAIN, redis_url, tmp_path)
    yield world
    world.close()


def calls_of(redis_url: str, folder: Path, *, extend: bool) -> int:
    """How many its start makes where Redis knows the scripts."""
    for _ in range(2):
        world, trap = World(PLAIN, redis_url, folder), Trap()
        if extend:
            world.start(PLAIN.rows)
            world.finish()
        world.start(LONGER if extend else PLAIN.rows, trap, extend=extend)
        world.close()
    return trap.calls


@pytest.mark.parametrize("what", AWAY_WHATS)
@pytest.mark.parametrize("extend", [False, True])
def test_a_start_that_is_broken_off_anywhere_is_made_good_by_the_next(
    redis_url: str, tmp_path: Path, extend: bool, what: What
) -> None:
    wanted, _ = undisturbed(Case(LONGER if extend else PLAIN.rows, PLAIN.spec), redis_url, tmp_path)
    for at in range(AWAY_WHATS.index(what) % EACH, calls_of(redis_url, tmp_path, extend=extend), EACH):
        world = World(PLAIN, redis_url, tmp_path)
        if extend:
            world.start(PLAIN.rows)
            world.finish()
        trap = Trap.at_call(at, what)
        with suppress(*AWAY):  # not of the last call, which gives the lease back
            world.start(LONGER if extend else PLAIN.rows, trap, extend=extend)
        assert trap.log
        world.redis.delete(f"saggar:runs:{NAME}:lease")  # it ends by itself
        if extend:
            world.finish()  # whoever controls it has no need of the one that was killed
            found = world.facts()
            assert (found["state"], found["findings"]) == ("done", []), (trap.log, found["findings"])
        world.start(LONGER if extend else PLAIN.rows, extend=extend)
        world.finish()
        different = differences(wanted, world.facts())
        # A run that was extended has its plan in two parts.
        assert not {name for name in different if not (extend and name == "target")}, (trap.log, different)
        world.close()


@pytest.mark.parametrize("theirs", [PLAIN.rows, OTHER], ids=["the same rows", "other rows"])
def test_two_who_start_a_run_of_one_name_at_once(
    redis_url: str, tmp_path: Path, theirs: list[dict[str, object]]
) -> None:
    """One plan stands, whole; who came with another one is told."""
    same = theirs == PLAIN.rows
    for at in range(calls_of(redis_url, tmp_path, extend=False)):
        world = World(PLAIN, redis_url, tmp_path)
        refused = []
        trap = Trap.at_call(at, "rival")

        def rival(world: World = world, refused: list[str] = refused) -> None:
            try:
                world.start(theirs)
            except RunChanged:
                refused.append("theirs")

        trap.rival = rival
        try:
            world.start(PLAIN.rows, trap)
        except RunChanged:
            refused.append("ours")
        assert trap.log
        assert len(refused) == (0 if same else 1), (trap.log, refused)
        world.finish()
        found = world.facts()
        planned = len(PLAIN.rows if "ours" not in refused else theirs)
        assert (found["planned"], found["done"], found["findings"]) == (planned, planned, []), trap.log
        assert len(found["packed"]) == planned  # type: ignore[arg-type]
        world.close()


def test_two_who_extend_a_run_at_once(redis_url: str, tmp_path: Path) -> None:
    for at in range(0, calls_of(redis_url, tmp_path, extend=True), EACH):
        world = World(PLAIN, redis_url, tmp_path)
        world.start(PLAIN.rows)
        world.finish()
        trap = Trap.at_call(at, "rival")

        def rival(world: World = world) -> None:
            try:
                world.start([*PLAIN.rows, *OTHER], extend=True)
            except RunBusy:
                return  # the first one is at it

        trap.rival = rival
        world.start(LONGER, trap, extend=True)
        assert trap.log
        world.start([*PLAIN.rows, *OTHER], extend=True)
        world.finish()
        found = world.facts()
        assert (found["planned"], found["done"], found["findings"]) == (12, 12, []), trap.log
        world.close()


def test_a_run_that_is_forgotten_under_a_frozen_controller_stays_forgotten(
    redis_url: str, tmp_path: Path
) -> None:
    _, calls = undisturbed(CASES["plain"], redis_url, tmp_path)
    for at in range(3, calls, 23):
        world = World(CASES["plain"], redis_url, tmp_path)
        world.start(world.case.rows)
        trap = Trap.at_call(at, "rival")
        assert world.runs.claim(NAME, "somebody")
        assert not world.runs.drop(NAME), "somebody holds it"
        world.runs.release(NAME, "somebody")

        def rival(world: World = world) -> None:
            world.redis.delete(f"saggar:runs:{NAME}:lease")  # it has slept for longer than that
            assert world.runs.drop(NAME)

        trap.rival = rival
        with pytest.raises(UnknownRun):
            world.finish(trap)
        assert not list(world.redis.scan_iter("saggar:runs*")), trap.log
        world.close()
