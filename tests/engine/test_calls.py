"""Calls to the ranks besides plans: built in, of one's own, and profiles."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from saggar.engine import EngineClosed, RowFailed, Unsupported, WorkerDied

from tests.engine.conftest import MakeEngine
from tests.engine.support import at_step, check_noop, noop

ECHO = "tests.engine.support.Echo"


def test_calls_go_to_every_rank_and_come_back(make_engine: MakeEngine, executor: str) -> None:
    engine = make_engine(executor=executor, worker_extension=ECHO)
    assert engine.call("twice", 21) == [42]
    (memory,) = engine.call("memory")
    assert isinstance(memory, dict)
    assert memory["peak"] > 1_000_000
    for method in ("thrice", "_private", "family", "__class__"):
        with pytest.raises(Unsupported, match="the ranks have no method"):
            engine.call(method)
    with pytest.raises(RowFailed, match="TypeError"):
        engine.call("twice")
    check_noop(noop("a"), engine.submit(noop("a")).result(10))


def test_a_call_waits_for_the_border_of_a_plan(make_engine: MakeEngine, executor: str) -> None:
    engine = make_engine(executor=executor, worker_extension=ECHO, mode="step_batch")
    running = threading.Event()
    handle = engine.submit(noop("a", steps=100_000, sleep_s=0.001), on_event=at_step("a", 1, running.set))
    assert running.wait(20)
    assert engine.call("twice", 2, timeout_s=20) == [4]
    assert not handle.done()
    handle.cancel()


def test_a_call_has_its_own_deadline_and_ends_with_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine(worker_extension=ECHO)
    running = threading.Event()
    engine.submit(noop("a", steps=100_000, sleep_s=0.001), on_event=at_step("a", 1, running.set))
    assert running.wait(20)
    with pytest.raises(TimeoutError):
        engine.call("twice", 2, timeout_s=0.01)
    engine.close()
    with pytest.raises(EngineClosed):
        engine.call("twice", 2)


@pytest.mark.procs
def test_a_call_whose_time_is_over_before_it_began_never_begins(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(executor="multiproc", worker_extension=ECHO)
    with pytest.raises(TimeoutError):
        engine.call("wait", 1.0, timeout_s=0.1)  # has begun, and goes on
    with pytest.raises(TimeoutError):
        engine.call("touch", str(tmp_path / "late"), timeout_s=0.1)
    assert engine.call("touch", str(tmp_path / "in time"), timeout_s=20) == [str(tmp_path / "in time")]
    assert [path.name for path in tmp_path.iterdir()] == ["in time"]
    check_noop(noop("a"), engine.submit(noop("a")).result(10))


@pytest.mark.procs
def test_a_rank_that_dies_in_a_call_is_a_death(make_engine: MakeEngine) -> None:
    engine = make_engine(executor="multiproc", worker_extension=ECHO)
    with pytest.raises(WorkerDied, match="exit status 3"):
        engine.call("die")
    assert engine.call("twice", 4) == [8]


def test_an_extension_that_does_not_exist_fails_the_start(make_engine: MakeEngine) -> None:
    for name, says in (
        ("Echo", "Empty module name"),
        ("tests.nowhere.X", "No module"),
        ("os.path.join", "no subclass"),
    ):
        with pytest.raises(Unsupported, match=says):
            make_engine(worker_extension=name)


def test_a_profile_is_a_trace_for_each_rank(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine("sd3")
    engine.start_profile()
    with pytest.raises(Unsupported):
        engine.start_profile()
    engine.generate([noop("a", num_inference_steps=2)])
    (path,) = engine.stop_profile(str(tmp_path))
    names = {event.get("name", "") for event in json.loads(Path(path).read_text())["traceEvents"]}
    assert any("scaled_dot_product" in name for name in names)
    with pytest.raises(Unsupported):
        engine.stop_profile(str(tmp_path))
    with pytest.raises(Unsupported):
        make_engine("noop").start_profile()
