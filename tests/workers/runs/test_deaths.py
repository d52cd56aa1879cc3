"""A run comes to the same end at whatever call Redis or a store is away, or its controller is killed or robbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest
import redis
from saggar.jobs.errors import RunBusy

from tests.workers.runs.trap import Trap, What
from tests.workers.runs.world import NAME, Case, World, losses

pytestmark = pytest.mark.e2e
WHATS: tuple[What, ...] = get_args(What)
Check = Callable[[str, What, int], None]
EACH = 61
"""In CI, every so many calls; each case and each thing that happens begin at another one."""


def rows(count: int, first: int = 0) -> list[dict[str, object]]:
    return [{"prompt": f"p{n}", "seed": 2 * n} for n in range(first, first + count)]


def pause(world: World) -> None:
    """Paused amid the run while a job runs, which ends later; resumed after that."""
    run = world.runs.get(NAME)
    if run.done >= 2 and "begun" not in world.done:
        world.done.add("begun")
        waiting = world.client.list(state="queued", limit=1, newest_first=False).records
        world.held = [(record, world.begin(record)) for record in waiting]
        world.runs.change(NAME, "paused", "by hand")
    elif run.state == "paused" and run.open <= len(world.held) and "ended" not in world.done:
        world.done.add("ended")
        for record, begun in world.held:
            world.end(record, begun)
    elif run.state == "paused" and run.open == 0:
        world.runs.change(NAME, "running")


def cancel(world: World) -> None:
    if world.runs.get(NAME).done >= 2 and "cancelled" not in world.done:
        world.done.add("cancelled")
        world.runs.change(NAME, "cancelled", "by hand")


def extend(world: World) -> None:
    if world.runs.get(NAME).state == "done" and "extended" not in world.done:
        with suppress(RunBusy):  # whoever had it could not give it back yet: tried again, as the error says
            world.start([*world.case.rows, *rows(4, 10)], extend=True)
            world.done.add("extended")


def try_again(world: World) -> None:
    """As `saggar runs retry`: what failed and what was rejected."""
    if world.runs.get(NAME).state == "done" and "again" not in world.done:
        world.done.add("again")
        world.runs.again(NAME, ["failed", "rejected"])


ODD: list[dict[str, object]] = [
    {"prompt": "p0", "seed": 0},
    {"prompt": "p1", "seed": 1},
    {"prompt": "p2", "seed": 3},
    {"prompt": "never", "seed": 5000},
    {"prompt": "bad", "seed": 8},
]
SHARDS = {"format": "webdataset", "shard_count": 3}
GATES = {"gates": ("black>=30",), "redraws": 2}
BAD = frozenset({"bad"})
CASES = {
    "plain": Case(
        rows=[*rows(6), {"prompt": "two", "seed": 50, "num_outputs": 2}, {"prompt": "p long", "seed": 60}],
        spec=SHARDS,
        fails=frozenset({"p3"}),
    ),
    "losing": Case(rows=rows(7), spec=SHARDS, loses={"p1": "png", "p4": "result", "p5": "all"}),
    "delivered": Case(rows=ODD, spec=GATES, fails=BAD, loses={"p0": "png", "p2": "all"}),
    "at home": Case(rows=ODD, spec=GATES, fails=BAD, at_home=True),
    "packed": Case(
        rows=[*ODD[:4], {"prompt": "two", "seed": 20, "num_outputs": 2}],
        spec={**GATES, **SHARDS, "accept": 2},
        loses={"p1": "png"},
    ),
    "paused": Case(rows=rows(8), spec=SHARDS, happens=pause),
    "extended": Case(rows=rows(5), spec=SHARDS, happens=extend),
    "again": Case(rows=ODD, spec=GATES, fails=BAD, happens=try_again, at_home=True),
}
CANCELLED = Case(rows=rows(9), spec=SHARDS, happens=cancel)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, redis_url: str) -> Iterator[None]:
    """One thread, so that calls have an order, and few rows at a time; nothing is flushed, and no page is drawn."""
    monkeypatch.setattr("saggar.workers.runs.report.report_html", lambda *_: b"")
    monkeypatch.setattr("saggar.workers.runs.finish._THREADS", 1)
    monkeypatch.setattr("saggar.workers.runs.finish._ROWS", 3)
    monkeypatch.setattr("saggar.workers.runs.pack.SHOWN", 2)
    monkeypatch.setattr("saggar.workers.runs.pack._CHUNK", 2)
    monkeypatch.setattr("saggar.workers.runs.verify._THREADS", 1)
    with redis.Redis.from_url(redis_url, decode_responses=True) as server:
        before = server.config_get("appendfsync")
        server.config_set("appendfsync", "no")
        yield
        server.config_set("appendfsync", before["appendfsync"])


def undisturbed(case: Case, redis_url: str, folder: Path) -> tuple[dict[str, object], int]:
    """What it comes to, and how many calls its controllers make."""
    trap = Trap()
    world = World(case, redis_url, folder)
    try:
        world.start(case.rows)
        world.finish(trap)
        return world.facts(), trap.calls
    finally:
        world.close()


def disturbed(case: Case, redis_url: str, folder: Path, trap: Trap) -> dict[str, object]:
    world = World(case, redis_url, folder)

    def rival() -> None:
        if trap.what == "rival":
            world.finish()
        else:
            world.live(most=4)

    trap.rival = rival
    try:
        world.start(case.rows)
        world.finish(trap)
        return world.facts()
    finally:
        world.close()


def differences(wanted: dict[str, object], found: dict[str, object]) -> dict[str, tuple[object, object]]:
    return {name: (wanted[name], found[name]) for name in wanted if wanted[name] != found[name]}


Undisturbed = dict[str, tuple[dict[str, object], int, int]]
"""By case: what it comes to, in how many calls, and how many rows it says are lost."""


@pytest.fixture(scope="module")
def known() -> Undisturbed:
    return {}


@pytest.fixture
def check(redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, known: Undisturbed) -> Check:
    """Tries a case at every so many calls."""

    def try_it(name: str, what: What, each: int) -> None:
        case = CASES[name]
        if name not in known:
            undisturbed(case, redis_url, tmp_path)  # Redis does not know the scripts yet: other calls
            caplog.clear()
            known[name] = (*undisturbed(case, redis_url, tmp_path), losses(caplog.records))
        wanted, calls, said = known[name]
        wrong = []
        for at in range((7 * WHATS.index(what) + len(name)) % each, calls, each):
            caplog.clear()
            trap = Trap.at_call(at, what)
            different = differences(wanted, disturbed(case, redis_url, tmp_path, trap))
            # What is found lost by somebody who is killed before he can act is found again. Who sleeps as he removes
            # what is lost removes what was made anew: it is lost once more.
            slept = what in ("rival", "visitor") and any(
                "delete" in x and "result.json" in x for x in trap.log
            )
            if slept:
                different.pop("made", None)
            if different or not trap.log or losses(caplog.records) > 2 * said + 4 * slept:
                wrong.append((at, trap.log, different))
        assert not wrong, f"{len(wrong)} of {calls}: " + "\n".join(str(one)[:500] for one in wrong[:8])

    return try_it


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("name", CASES)
def test_it_comes_to_the_same_end(check: Check, name: str, what: What) -> None:
    check(name, what, EACH)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("name", CASES)
def test_it_comes_to_the_same_end_at_every_call(check: Check, name: str, what: What) -> None:
    check(name, what, 1)


@pytest.mark.parametrize("what", WHATS)
def test_a_cancelled_run_is_closed_whoever_was_killed(redis_url: str, tmp_path: Path, what: What) -> None:
    """What was done stands in shards, what waited is cancelled, nothing is left in the queue or aside."""
    for _ in range(2):  # the first time Redis does not know the scripts yet: more calls
        _, calls = undisturbed(CANCELLED, redis_url, tmp_path)
    for at in range(WHATS.index(what), calls, EACH):
        trap = Trap.at_call(at, what)
        found = disturbed(CANCELLED, redis_url, tmp_path, trap)
        assert trap.log, f"call {at} of {calls} was not made"
        letters = str(found["rows"])
        assert found["state"] == "cancelled" and not set(letters) - set("pc"), (trap.log, found)
        assert (found["done"], found["cancelled"]) == (letters.count("p"), letters.count("c")), trap.log
        assert found["pictures"] == found["batched"] == len(found["packed"]) == found["done"], trap.log  # type: ignore[arg-type]
        assert not [key for key in found["store"] if "/objects/" in key], (trap.log, found["store"])  # type: ignore[attr-defined]
        target = found["target"]
        assert isinstance(target, list)
        assert f"_runs/{NAME}/report.json" in target and f"_runs/{NAME}/_SUCCESS" not in target, trap.log
        assert not [one for one in found["records"] if one[1] in ("queued", "running")], trap.log  # type: ignore[attr-defined]
