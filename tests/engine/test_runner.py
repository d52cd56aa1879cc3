"""A rank's turns without an engine: what a plan does to the states, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saggar.engine import EngineConfig, Request
from saggar.engine.worker.limits import RowLimits
from saggar.engine.worker.loader import load
from saggar.engine.worker.plan import Plan, Report, RowReport
from saggar.engine.worker.runner import Runner

Models = Callable[[str], Path]


@pytest.fixture(params=["noop", "flux", "sd3"])
def runner(request: pytest.FixtureRequest, models: Models) -> Runner:
    config = EngineConfig(
        model=str(models(request.param)), executor="local", max_batch=4, threads=1, warmup=()
    )
    return load(config)[0]


def wish(runner: Runner, name: str, steps: int, **fields: Any) -> Request:
    field = "steps" if runner.family.name == "noop" else "num_inference_steps"
    return runner.family.validate(Request(name, f"prompt of {name}", params={field: steps}, **fields))


def turn(runner: Runner, **fields: Any) -> Report:
    """One plan, in which nothing is cancelled."""
    return runner.execute(Plan(id=1, **fields), lambda _: (), lambda _: None)


def status(report: Report) -> dict[str, tuple[str, int]]:
    return {row.id: (row.status, row.step) for row in report.rows}


def latents(runner: Runner, name: str) -> np.ndarray:
    return np.asarray(runner.states[name].latents).copy()


def test_a_parked_request_keeps_its_latents_and_its_step(runner: Runner) -> None:
    a, b = wish(runner, "a", 5), wish(runner, "b", 3)
    turn(runner, admit=(a,), run=("a",), steps=2)
    kept = latents(runner, "a")
    assert status(turn(runner, admit=(b,), run=("b",))) == {"b": ("done", 3)}
    assert (latents(runner, "a") == kept).all()
    assert runner.states["a"].step_index == 2
    parked = turn(runner, run=("a",))
    whole = turn(runner, admit=(wish(runner, "a", 5),), run=("a",))
    assert status(parked) == status(whole) == {"a": ("done", 5)}
    assert (parked.rows[0].media[0] == whole.rows[0].media[0]).all()
    assert len(runner) == 0


def test_a_turn_ends_when_its_steps_are_made_or_a_row_finishes(runner: Runner) -> None:
    a, b = wish(runner, "a", 6), wish(runner, "b", 4)
    report = turn(runner, admit=(a, b), run=("a", "b"), steps=1)
    assert status(report) == {"a": ("running", 1), "b": ("running", 1)}
    assert status(turn(runner, run=("a", "b"))) == {"a": ("running", 4), "b": ("done", 4)}
    assert status(turn(runner, run=("a",))) == {"a": ("done", 6)}


def test_decoding_has_a_budget_while_others_run(runner: Runner) -> None:
    requests = [wish(runner, "long", 9), *(wish(runner, f"r{i}", 1) for i in range(3))]
    run = tuple(request.id for request in requests)
    first = status(turn(runner, admit=tuple(requests), run=run, decode_rows=2))
    assert first == {"long": ("running", 1), "r0": ("done", 1), "r1": ("done", 1), "r2": ("decoding", 1)}
    second = status(turn(runner, run=("long", "r2"), decode_rows=2))
    assert second == {"long": ("running", 2), "r2": ("done", 1)}


def test_a_cancel_inside_a_plan_ends_the_turn_at_the_next_border(runner: Runner) -> None:
    a, b = wish(runner, "a", 6), wish(runner, "b", 6)
    told: list[Sequence[RowReport]] = []
    report = runner.execute(
        Plan(1, run=("a", "b"), admit=(a, b)), lambda _: ["a"] if len(told) == 2 else [], told.append
    )
    assert status(report) == {"a": ("dropped", 2), "b": ("running", 2)}
    assert [[row.step for row in rows] for rows in told] == [[1, 1], [2, 2]]
    assert set(runner.states) == {"b"}
    assert status(turn(runner, drop=("b",), run=())) == {}
    assert len(runner) == 0


def test_a_cancel_before_the_first_step_encodes_nothing(runner: Runner) -> None:
    report = runner.execute(
        Plan(1, run=("a",), admit=(wish(runner, "a", 2),)), lambda _: ["a"], lambda rows: None
    )
    assert status(report) == {"a": ("dropped", 0)}
    assert not runner.family.counters


def test_a_name_may_come_back_in_the_plan_that_drops_it(runner: Runner) -> None:
    turn(runner, admit=(wish(runner, "a", 5),), run=("a",), steps=3)
    report = turn(runner, drop=("a",), admit=(wish(runner, "a", 2),), run=("a",))
    assert status(report) == {"a": ("done", 2)}


def test_more_rows_than_a_forward_holds_are_taken_in_pieces(runner: Runner) -> None:
    requests = (wish(runner, "a", 1, num_outputs=6), wish(runner, "b", 1, num_outputs=3))
    report = turn(runner, admit=requests, run=("a", "b"))
    assert [len(row.media) for row in report.rows] == [6, 3]
    assert report.counters["forwards.cond"] == 3
    assert report.counters["rows.cond"] == 9


def test_limits_are_learned_by_key() -> None:
    limits = RowLimits(8)
    assert limits.halve("large", 5) == 2
    assert (limits.of("large"), limits.of("small")) == (2, 8)
    assert limits.halve("large", 1) == 1
