"""Ranks that die, hang or part: the group starts anew by itself, and every request ends once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from saggar.engine import Cancelled, DeadlineExceeded, Engine, WorkerDied
from saggar.engine.config import Patience, WarmUp

from tests.engine.conftest import MakeEngine
from tests.engine.faults import FAULTS, FOLDER, order
from tests.engine.support import Recorder, alive, check_noop, eventually, noop, settled

pytestmark = pytest.mark.procs

QUICK = Patience(pulse_s=0.1, silence_s=1.5, backoff_s=0.05)
HOWS = ("kill", "stop", "exit")


@pytest.fixture
def start(make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Engines whose ranks fail on order."""
    monkeypatch.setenv(FOLDER, str(tmp_path))

    def make(family: str = "noop", **settings: Any) -> Engine:
        own = {"executor": "multiproc", "worker_extension": FAULTS, "patience": QUICK}
        return make_engine(family, **own | settings)

    return make


def serves(engine: Engine, name: str = "after") -> None:
    """A new request is done by new ranks."""
    check_noop(noop(name), engine.submit(noop(name)).result(30))
    assert engine.health().ok
    assert engine.health().reason == ""


MATRIX = [(verb, how) for verb in ("encode", "predict", "combine", "step", "decode") for how in HOWS]
PAIRS = [("encode", "kill"), ("predict", "stop"), ("combine", "exit"), ("step", "kill"), ("decode", "exit")]


@pytest.mark.parametrize(
    ("verb", "how"), [pytest.param(*pair, marks=() if pair in PAIRS else pytest.mark.soak) for pair in MATRIX]
)
def test_a_lost_rank_costs_nobody_anything(
    start: Callable[..., Engine], verb: str, how: str, mode: str
) -> None:
    engine = start(mode=mode)
    before = engine.health().pids
    recorder = Recorder()
    culprit = noop("culprit", prompt=order(verb, how))
    engine.pause()
    handles = {
        request.id: (request, engine.submit(request, on_event=recorder))
        for request in (noop("a"), culprit, noop("b"), noop("other", key="other"))
    }
    engine.resume()
    for request, handle in handles.values():
        check_noop(request, handle.result(30))
    for name in handles:
        assert recorder.kinds(name).count("output") == 1
        assert recorder.steps(name)[-4:] == [1, 2, 3, 4]
    assert recorder.kinds("culprit").count("started") == 2
    assert recorder.kinds("other").count("started") == 1
    serves(engine)
    assert settled(engine)["ended.completed"] == 5
    assert not set(before) & set(engine.health().pids)
    assert not any(alive(pid) for pid in before)


def test_a_request_that_kills_twice_ends_alone(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.pause()
    good = [engine.submit(noop(f"r{i}")) for i in range(4)]
    poison = engine.submit(noop("poison", prompt=order("predict", "kill", times=99)))
    engine.resume()
    with pytest.raises(WorkerDied, match="killed by SIGKILL"):
        poison.result(30)
    for index, handle in enumerate(good):
        output = handle.result(30)
        check_noop(noop(f"r{index}"), output)
        assert output.batch_size == 1
    serves(engine)


def test_a_suspect_runs_alone_and_ends_with_the_first_death(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.pause()
    once = engine.submit(noop("once", suspect=True, prompt=order("predict", "kill")))
    harmless = engine.submit(noop("harmless", suspect=True))
    others = [engine.submit(noop(f"r{i}")) for i in range(2)]
    engine.resume()
    with pytest.raises(WorkerDied, match="killed by SIGKILL"):
        once.result(30)
    assert harmless.result(30).batch_size == 1
    for index, handle in enumerate(others):
        check_noop(noop(f"r{index}"), handle.result(30))


def test_any_number_of_them_is_outlived_while_others_succeed(start: Callable[..., Engine]) -> None:
    engine = start(max_batch=1)
    for number in range(4):
        poison = engine.submit(noop(f"poison-{number}", prompt=order("predict", "kill", times=99)))
        with pytest.raises(WorkerDied, match="killed by SIGKILL"):
            poison.result(30)
        serves(engine, f"after-{number}")


def test_three_failures_are_enough(start: Callable[..., Engine], tmp_path: Path) -> None:
    engine = start(max_batch=1)
    engine.pause()
    waiting = engine.submit(noop("waiting", key="other"))
    one = engine.submit(noop("one", prompt=order("step", "kill", times=2), priority=0))
    two = engine.submit(noop("two", prompt=order("step", "exit", times=2), priority=0))
    engine.resume()
    assert str(one.wait()).endswith("(killed by SIGKILL)")
    for handle in (two, waiting):
        assert str(handle.wait()).startswith("the ranks failed too often, at last: ")
        assert "exit status 3" in str(handle.error())
    health = engine.health()
    assert (health.ok, health.over, engine.room().seats) == (False, True, 0)
    assert "failed too often" in health.reason
    with pytest.raises(WorkerDied, match="failed too often"):
        engine.submit(noop("late"))
    assert not any(alive(pid) for pid in health.pids)


def test_what_waits_is_kept_and_its_deadlines_and_cancels_too(
    start: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = start(patience=Patience(pulse_s=0.1, silence_s=60, backoff_s=0.05))
    (tmp_path / "warm-up").write_text(order("predict", "4"))
    told = threading.Event()
    engine.on_room(told.set)
    running = engine.submit(noop("running", prompt=order("predict", "kill")))
    eventually(lambda: not engine.health().ok, timeout_s=2)
    eventually(lambda: engine.room().seats == 0, timeout_s=2)
    late = engine.submit(noop("late", deadline_s=0.2))
    dropped = engine.submit(noop("dropped"))
    kept = engine.submit(noop("kept"))
    assert "killed by SIGKILL" in engine.health().reason
    assert not engine.health().over
    told.clear()
    assert dropped.cancel()
    assert isinstance(dropped.wait(), Cancelled)
    assert isinstance(late.wait(), DeadlineExceeded)
    assert not engine.health().ok
    check_noop(noop("kept"), kept.result(30))
    assert running.wait() is None
    assert told.wait(10)
    assert engine.room().seats == 8


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_death_in_the_restarts_own_warm_up_is_another_failure(
    start: Callable[..., Engine], tmp_path: Path, how: str
) -> None:
    engine = start()
    (tmp_path / "warm-up").write_text(order("decode", how))
    handle = engine.submit(noop("a", prompt=order("step", how)))
    assert handle.wait() is None
    serves(engine)
    (tmp_path / "warm-up").write_text(order("encode", how, times=9))
    engine.call("memory")
    os.kill(engine.health().pids[0], signal.SIGKILL)
    eventually(lambda: engine.health().over)


def test_a_restart_that_raises_is_tried_again(start: Callable[..., Engine], tmp_path: Path) -> None:
    engine = start()
    (tmp_path / "warm-up").write_text(order("encode", "raise"))
    assert engine.submit(noop("a", prompt=order("step", "kill"))).wait() is None
    serves(engine)


def test_close_does_not_wait_for_a_restart(start: Callable[..., Engine], tmp_path: Path) -> None:
    engine = start()
    (tmp_path / "warm-up").write_text(order("predict", "600"))
    handle = engine.submit(noop("a", prompt=order("step", "kill")))
    eventually(lambda: not engine.health().ok)
    engine.close()
    assert type(handle.wait()).__name__ == "EngineClosed"
    assert not any(alive(pid) for pid in engine.health().pids)


def test_a_verb_that_never_ends_is_found_and_a_long_one_is_not(start: Callable[..., Engine]) -> None:
    patience = Patience(pulse_s=0.05, silence_s=30, progress_s=0.4, first_s=0.4, backoff_s=0.05)
    engine = start(patience=patience, warmup=(WarmUp(params={"sleep_s": 0.2}),))
    long = noop("long", steps=2, sleep_s=1.5)  # 20 times the slowest seen, 0.2 s, is more
    check_noop(long, engine.submit(long).result(20))
    hung = engine.submit(noop("hung", prompt=order("predict", "hang", times=2), key="unseen"))
    error = hung.wait()
    assert isinstance(error, WorkerDied)
    assert "denoise hangs" in str(error)
    serves(engine)


def test_loading_and_warming_up_may_take_any_time(start: Callable[..., Engine], tmp_path: Path) -> None:
    (tmp_path / "warm-up").write_text(order("predict", "1.5"))
    patience = Patience(pulse_s=0.05, silence_s=30, progress_s=0.2, first_s=0.2, backoff_s=0.05)
    serves(start(patience=patience))
