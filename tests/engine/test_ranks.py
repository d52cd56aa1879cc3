"""Groups of several ranks: they do the same, agree before and while they work, and are lost together."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saggar.engine import Cancelled, Engine, LoadError, OutOfMemory, Unsupported, WorkerDied
from saggar.engine.config import EngineConfig, Patience
from saggar.engine.errors import RanksParted

from tests.engine.conftest import MakeEngine
from tests.engine.faults import DIFFERENCES, FAULTS, FOLDER, order, told_otherwise
from tests.engine.support import Recorder, alive, at_step, check_noop, eventually, noop, settled
from tests.support.memory import named_segments

pytestmark = pytest.mark.procs

Models = Callable[[str], Path]
QUICK = Patience(pulse_s=0.1, silence_s=1.5, backoff_s=0.05)


@pytest.fixture
def start(make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Engines of several ranks that fail on order."""
    monkeypatch.setenv(FOLDER, str(tmp_path))

    def make(ranks: int, family: str = "noop", **settings: Any) -> Engine:
        own = {"executor": "multiproc", "worker_extension": FAULTS, "patience": QUICK}
        return make_engine(family, ranks=ranks, **own | settings)

    return make


def test_several_ranks_do_what_one_does(start: Callable[..., Engine], mode: str) -> None:
    engine = start(3, mode=mode)
    assert len(set(engine.health().pids)) == 3
    requests = [noop(f"r{i}", num_outputs=1 + i % 3, steps=1 + i % 4, key=str(i % 2)) for i in range(20)]
    for request, output in zip(requests, engine.generate(requests), strict=True):
        check_noop(request, output)


def test_a_cancel_reaches_all_ranks_at_the_same_border(start: Callable[..., Engine], mode: str) -> None:
    engine = start(2, mode=mode)
    running = threading.Event()
    neighbour = engine.submit(noop("b", steps=300, sleep_s=0.001))
    victim = engine.submit(noop("a", steps=100_000), on_event=at_step("a", 3, running.set))
    assert running.wait(20)
    assert victim.cancel()
    assert isinstance(victim.wait(), Cancelled)
    check_noop(noop("b"), neighbour.result(20))
    assert engine.health().ok


def test_calls_go_to_all_ranks_or_to_one(start: Callable[..., Engine]) -> None:
    engine = start(2, worker_extension="tests.engine.support.Echo")
    assert engine.call("twice", 4) == [8, 8]
    assert engine.call("pid") == list(engine.health().pids)
    assert engine.call("pid", rank=1) == [engine.health().pids[1]]
    with pytest.raises(Unsupported, match="there is no rank 2, but 2"):
        engine.call("pid", rank=2)


VERBS = ("encode", "predict", "combine", "step", "decode")
PLACES = [(ranks, rank) for ranks in (1, 2, 4) for rank in range(ranks)]
MATRIX = [(*place, verb, how) for place in PLACES for verb in VERBS for how in ("kill", "stop", "raise")]
PAIRS = [
    (1, 0, "step", "raise"),
    (2, 0, "predict", "kill"),
    (2, 1, "step", "stop"),
    (2, 1, "encode", "raise"),
    (2, 0, "decode", "raise"),
    (4, 3, "combine", "kill"),
    (4, 2, "predict", "raise"),
]


def serves(engine: Engine, ranks: int, before: set[str]) -> None:
    """It serves, and leaves nothing when it is closed."""
    check_noop(noop("after"), engine.submit(noop("after")).result(30))
    pids = engine.health().pids
    assert engine.health().ok
    assert len(pids) == ranks
    engine.close()
    eventually(lambda: not any(alive(pid) for pid in pids))
    assert named_segments() == before


@pytest.mark.parametrize(
    ("ranks", "rank", "verb", "how"),
    [pytest.param(*case, marks=() if case in PAIRS else pytest.mark.soak) for case in MATRIX],
)
def test_a_rank_that_fails_takes_its_group_along_and_no_request(
    start: Callable[..., Engine], ranks: int, rank: int, verb: str, how: str
) -> None:
    before = named_segments()
    engine = start(ranks)
    pids = engine.health().pids
    engine.pause()
    requests = [noop("a"), noop("b", prompt=order(verb, how, rank)), noop("c")]
    recorder = Recorder()
    handles = [engine.submit(request, on_event=recorder) for request in requests]
    engine.resume()
    rows_own = (
        ranks == 1 and how == "raise"
    )  # alone it costs no group: what was one row's fault is that row's end
    for request, handle in zip(requests, handles, strict=True):
        error = handle.wait()
        if rows_own and verb == "step" and request.id == "b":
            assert str(error) == "RuntimeError: asked to fail"
        else:
            check_noop(request, handle.result(0))
        ends = [kind for kind in recorder.kinds(request.id) if kind in ("output", "error")]
        assert len(ends) == 1
    if rows_own:
        assert engine.health().pids == pids
    else:
        assert not set(pids) & set(engine.health().pids)
        eventually(lambda: not any(alive(pid) for pid in pids))
    serves(engine, ranks, before)


@pytest.mark.parametrize(
    ("ranks", "rank", "how"),
    [
        pytest.param(*place, how, marks=() if (*place, how) == (2, 1, "kill") else pytest.mark.soak)
        for place in PLACES
        for how in ("kill", "stop", "raise")
    ],
)
def test_ranks_that_fail_twice_in_a_row_in_the_restarts_own_warm_up(
    start: Callable[..., Engine], tmp_path: Path, ranks: int, rank: int, how: str
) -> None:
    before = named_segments()
    engine = start(ranks, patience=replace(QUICK, failures=4))
    pids = engine.health().pids
    (tmp_path / "warm-up").write_text(order("decode", how, rank, 2))
    requests = [noop("a", prompt=order("step", "kill", rank)), noop("b"), noop("c", key="other")]
    recorder = Recorder()
    handles = [engine.submit(request, on_event=recorder) for request in requests]
    for request, handle in zip(requests, handles, strict=True):
        check_noop(request, handle.result(30))
        assert recorder.kinds(request.id).count("output") == 1
    assert len(list(tmp_path.glob("fault decode *"))) == 2
    assert not any(alive(pid) for pid in pids)
    serves(engine, ranks, before)


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_ends_on_one_rank_ends_the_group_and_the_rows_run_at_half_size(
    start: Callable[..., Engine], rank: int
) -> None:
    engine = start(2)
    before = engine.health().pids
    request = noop("a", prompt=order("predict", "memory", rank), num_outputs=8, steps=3)
    recorder = Recorder()
    check_noop(request, engine.submit(request, on_event=recorder).result(30))
    assert recorder.kinds("a").count("started") == 2
    assert not set(before) & set(engine.health().pids)
    assert settled(engine)["forwards.cond"] == 6  # of the new ranks: two in each of three steps
    again = noop("b", num_outputs=8, steps=3)
    check_noop(again, engine.submit(again).result(30))
    assert settled(engine)["forwards.cond"] == 12


@pytest.mark.parametrize(("how", "kind"), [("memory", OutOfMemory), ("raise", WorkerDied)])
def test_a_row_that_fails_on_one_rank_again_ends_in_error(
    start: Callable[..., Engine], how: str, kind: type[Exception]
) -> None:
    engine = start(2)
    culprit = engine.submit(noop("a", prompt=order("decode", how, 1, 9)))
    error = culprit.wait()
    assert type(error) is (kind if kind is OutOfMemory else RanksParted)
    assert isinstance(error, kind)
    assert "rank 1 failed and rank 0 did not: " in str(error)
    assert "asked to fail" in str(error)
    check_noop(noop("b"), engine.submit(noop("b")).result(30))


@pytest.mark.parametrize("how", ["raise", "memory"])
def test_ranks_that_wait_in_a_collective_for_one_that_failed_are_ended(
    start: Callable[..., Engine], make_engine: MakeEngine, how: str
) -> None:
    wish = {"num_inference_steps": 2, "guidance_scale": 4.0, "negative_prompt": ""}
    request = noop("a", prompt=order("predict", how, 1), **wish)
    (alone,) = make_engine("sd3").generate([request])
    engine = start(2, "sd3", cfg=2)  # a branch each, which they give each other
    before = engine.health().pids
    recorder = Recorder()
    output = engine.submit(request, on_event=recorder).result(60)
    np.testing.assert_array_equal(alone.images[0], output.images[0])
    assert recorder.kinds("a").count("started") == 2
    assert not set(before) & set(engine.health().pids)


def test_what_fails_alike_on_all_ranks_is_a_rows_error(start: Callable[..., Engine], mode: str) -> None:
    engine = start(3, mode=mode)
    pids = engine.health().pids
    engine.pause()
    good = [engine.submit(noop(f"g{i}", memory_rows=3)) for i in range(5)]
    verbs = ("encode", "predict", "step", "decode")
    bad = [engine.submit(noop(verb, fail_at=verb, fail_text="cracked")) for verb in verbs[: 8 - len(good)]]
    engine.resume()
    assert {str(handle.wait()) for handle in bad} == {"ValueError: cracked"}
    for handle in good:
        check_noop(noop(handle.id), handle.result(30))
    assert engine.health().pids == pids
    assert engine.health().ok
    assert settled(engine)["memory.halved"] > 0


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_rank_that_differs_stops_the_start(
    start: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    (tmp_path / "differs").write_text(what)
    if what == "plan":
        monkeypatch.setattr("saggar.engine.executor.group.Start", told_otherwise)
    family, degrees = ("sd3", {"cfg": 2}) if what in ("tokens", "numerics") else ("noop", {})
    with pytest.raises(LoadError, match=rf"rank 1 differs from rank 0 in its {what} \(.*, not .*\)$"):
        start(2, family, worker_extension="tests.engine.faults.Differs", **degrees)


def test_a_restart_finds_what_was_there_before(start: Callable[..., Engine], models: Models) -> None:
    model = models("noop")
    engine = start(2, model=str(shutil.copytree(model, model.with_name("changing"))))
    (model.with_name("changing") / "new.json").write_text("{}")
    os.kill(engine.health().pids[1], signal.SIGKILL)
    eventually(lambda: engine.health().over)
    assert "the ranks are others than before, in their weights" in engine.health().reason


def test_one_process_has_one_rank() -> None:
    with pytest.raises(Unsupported, match="the local executor has one rank"):
        EngineConfig(model="x", executor="local", ranks=2)


def test_ranks_with_torch_find_each_other_and_agree(make_engine: MakeEngine) -> None:
    request = noop("a", num_inference_steps=2)
    (alone,) = make_engine("sd3").generate([request])
    (together,) = make_engine("sd3", executor="multiproc", cfg=2).generate([request])
    np.testing.assert_array_equal(alone.images[0], together.images[0])
