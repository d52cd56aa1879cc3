"""Replicas under one scheduler: they share the work, and the end of one is not the end of another."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from saggar.engine import Cancelled, Engine, LoadError, WorkerDied
from saggar.engine.config import Patience

from tests.engine.conftest import MakeEngine
from tests.engine.faults import FAULTS, FOLDER, order
from tests.engine.support import Recorder, alive, at_step, check_noop, eventually, noop, settled

QUICK = Patience(pulse_s=0.1, silence_s=1.5, backoff_s=0.05)


@pytest.fixture
def start(make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Engines of several replicas whose ranks fail on order."""
    monkeypatch.setenv(FOLDER, str(tmp_path))

    def make(replicas: int, **settings: Any) -> Engine:
        own = {"executor": "multiproc", "worker_extension": FAULTS, "patience": QUICK, "max_batch": 4}
        return make_engine(replicas=replicas, **own | settings)

    return make


def occupy(engine: Engine, names: str) -> dict[str, Any]:
    """One long request of a key of its own for each letter, all of them running at the same time."""
    events = {name: threading.Event() for name in names}
    handles = {
        name: engine.submit(
            noop(name, key=name, steps=400, sleep_s=0.005), on_event=at_step(name, 2, events[name].set)
        )
        for name in names
    }
    assert all(event.wait(20) for event in events.values())
    assert engine.stats()["running"] == len(names)
    return handles


def test_replicas_run_side_by_side_and_each_request_once(
    start: Callable[..., Engine], executor: str, mode: str
) -> None:
    engine = start(3, executor=executor, mode=mode)
    assert engine.room().seats == 12
    for handle in occupy(engine, "xyz").values():
        assert handle.cancel()
        assert isinstance(handle.wait(), Cancelled)
    recorder, draw = Recorder(), random.Random(3)
    requests = [
        noop(f"r{i}", key=draw.choice("ab"), steps=draw.randint(1, 5), num_outputs=draw.randint(1, 3))
        for i in range(60)
    ]
    handles = [engine.submit(request, on_event=recorder) for request in requests]
    for request, handle in zip(requests, handles, strict=True):
        output = handle.result(30)
        check_noop(request, output)
        assert 1 <= output.batch_size <= 4
    assert all(recorder.kinds(request.id).count("output") == 1 for request in requests)
    stats = settled(engine)
    assert stats["ended.completed"] == 60
    assert stats["rows.cond"] >= sum(request.rows * int(str(request.params["steps"])) for request in requests)


@pytest.mark.procs
@pytest.mark.parametrize("replicas", [2, 3])
def test_one_that_is_killed_does_not_stop_the_others(start: Callable[..., Engine], replicas: int) -> None:
    engine = start(replicas)
    names = "abc"[:replicas]
    handles = occupy(engine, names)
    before = engine.health().pids
    os.kill(before[0], signal.SIGKILL)
    eventually(lambda: "SIGKILL" in engine.health().reason, timeout_s=2)
    assert engine.health().ok
    assert engine.room().seats > 0
    for name, handle in handles.items():
        check_noop(noop(name), handle.result(30))
    eventually(lambda: engine.health().reason == "")
    after = engine.health().pids
    assert after[0] != before[0]
    assert after[1:] == before[1:]
    assert not alive(before[0])


@pytest.mark.procs
def test_one_that_fails_too_often_leaves_the_work_to_the_rest(
    start: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = start(2, mode="step_batch", worker_extension=FAULTS)
    handles = occupy(engine, "ab")
    (tmp_path / "warm-up").write_text(order("encode", "kill", times=99))
    pids = engine.health().pids
    os.kill(pids[0], signal.SIGKILL)
    eventually(lambda: "too often" in engine.health().reason)
    assert engine.health().ok
    assert not engine.health().over
    assert engine.room().seats > 0
    with pytest.raises(WorkerDied, match="too often"):
        engine.call("memory", rank=0)
    assert len(engine.call("memory")) == 1
    for name, handle in handles.items():
        check_noop(noop(name), handle.result(30))
    waiting = engine.submit(noop("c", steps=100_000, sleep_s=0.01))
    os.kill(pids[1], signal.SIGKILL)
    assert "too often" in str(waiting.wait())
    assert engine.health().over
    assert engine.room().seats == 0


@pytest.mark.procs
def test_one_that_cannot_start_fails_the_start(start: Callable[..., Engine], tmp_path: Path) -> None:
    (tmp_path / "warm-up").write_text(order("decode", "raise"))
    with pytest.raises(LoadError, match="asked to fail"):
        start(2)


@pytest.mark.procs
def test_replicas_may_have_several_ranks(start: Callable[..., Engine]) -> None:
    engine = start(2, ranks=2, worker_extension="tests.engine.support.Echo")
    pids = engine.health().pids
    assert len(set(pids)) == 4
    assert engine.call("pid") == list(pids)
    assert engine.call("pid", rank=3) == [pids[3]]
    handles = occupy(engine, "ab")
    os.kill(pids[3], signal.SIGKILL)
    for name, handle in handles.items():
        check_noop(noop(name), handle.result(30))
    eventually(lambda: engine.health().reason == "")
    assert engine.health().pids[:2] == pids[:2]
