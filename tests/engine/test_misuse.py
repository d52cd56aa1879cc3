"""What callers do wrong: one line for each, and no other request notices."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
from saggar.engine import (
    Cancelled,
    EngineClosed,
    EngineConfig,
    InvalidRequest,
    RowFailed,
    Unsupported,
    WorkerDied,
)
from saggar.engine.config import Nodes, Patience, WarmUp
from saggar.engine.request import Request

from tests.engine.conftest import MakeEngine
from tests.engine.support import alive, at_step, check_noop, eventually, noop, settled

ECHO = "tests.engine.support.Echo"


class Words(StrEnum):
    HELLO = "hello"


class Count(int):
    """An integer of the caller's own."""


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"model": None}, "model must be a text, not None"),
        ({"device": 0}, "device must be auto, cpu, cuda or cuda:N, not 0"),
        ({"max_batch": "8"}, "max_batch must be an integer, not '8'"),
        ({"max_batch": 1.5}, "max_batch must be an integer, not 1.5"),
        ({"max_batch": True}, "max_batch must be an integer, not True"),
        ({"replicas": float("nan")}, "replicas must be an integer, not nan"),
        ({"ranks": -1}, "ranks must be 0 or more, not -1"),
        ({"ranks": []}, r"ranks must be an integer, not \[\]"),
        ({"cfg": None}, "cfg must be an integer, not None"),
        ({"threads": 0.5}, "threads must be an integer or None, not 0.5"),
        ({"prompt_cache_mb": "all"}, "prompt_cache_mb must be an integer, not 'all'"),
        ({"age_bound_s": None}, "age_bound_s must be a number, not None"),
        ({"ageing_s": "1"}, "ageing_s must be a number, not '1'"),
        ({"warmup": [WarmUp()]}, "warmup must be a tuple of WarmUp"),
        ({"warmup": ({},)}, "warmup must be a tuple of WarmUp"),
        ({"attention": "self=cudnn"}, "attention must be a mapping of roles to kernels, not 'self=cudnn'"),
        ({"vae_tiling": "no"}, "vae_tiling must be true or false, not 'no'"),
        ({"compile": 1}, "compile must be true or false, not 1"),
        ({"worker_extension": 5}, "worker_extension must be a dotted name or None, not 5"),
        ({"nodes": 2}, "nodes must be a Nodes or None, not 2"),
        ({"patience": None}, "patience must be a Patience, not None"),
        ({"calibration_file": None}, "calibration_file must be a path as text, not None"),
    ],
)
def test_settings_of_a_wrong_kind(setting: dict[str, Any], says: str) -> None:
    with pytest.raises(Unsupported, match=f"^{says}"):
        EngineConfig(**{"model": "x"} | setting)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Patience(pulse_s="1"), "patience.pulse_s must be a number, not '1'"),  # type: ignore[arg-type]
        (lambda: Patience(failures=2.5), "patience.failures must be an integer, not 2.5"),  # type: ignore[arg-type]
        (lambda: Patience(silence_s=0), "patience.silence_s must be above 0, not 0"),
        (lambda: Nodes("2", "h:1"), "nodes.count must be an integer, not '2'"),  # type: ignore[arg-type]
        (lambda: Nodes(1, "h:1"), "nodes.count must be at least 2, not 1"),
        (lambda: Nodes(2, None), "nodes.address must be host:port, not None"),  # type: ignore[arg-type]
        (lambda: WarmUp(rows=0), "warmup.rows must be at least 1, not 0"),
        (lambda: WarmUp(params=[]), "warmup.params must be a mapping"),  # type: ignore[arg-type]
    ],
)
def test_parts_of_settings_of_a_wrong_kind(make: Callable[[], object], says: str) -> None:
    with pytest.raises(Unsupported, match=f"^{says}"):
        make()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"params": None}, "params: NoneType was given"),
        ({"params": []}, "params: list was given"),
        ({"inputs": []}, "inputs: list was given"),
        ({"inputs": {"image": None}}, "inputs.image: NoneType was given (allowed: a list, also of one)"),
        ({"inputs": {"image": np.zeros((4, 4, 3))}}, "inputs.image: float64 4x4x3 was given"),
        ({"suspect": "yes"}, "suspect: 'yes' was given (allowed: true or false)"),
        ({"deadline_s": float("nan")}, "deadline_s: nan is not a time from now"),
    ],
)
def test_requests_of_a_wrong_kind(make_engine: MakeEngine, fields: dict[str, Any], says: str) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(Request(**{"id": "a", "prompt": "p"} | fields))
    assert str(caught.value).startswith(says)
    check_noop(noop("b"), engine.submit(noop("b")).result(10))


def test_what_is_no_request_or_reservation(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for wrong in (None, {}, "a prompt", Request):
        with pytest.raises(InvalidRequest, match=r"^request: "):
            engine.submit(wrong)  # type: ignore[arg-type]
    for rows in (0, -5, "a", 1.5, True):
        with pytest.raises(InvalidRequest, match=r"^rows: "):
            engine.reserve("k", rows)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"^key: "):
        engine.reserve(None, 1)  # type: ignore[arg-type]
    assert settled(engine)["reserved_rows"] == 0
    assert [output.request_id for output in engine.generate(noop(f"r{i}") for i in range(3))] == [
        "r0",
        "r1",
        "r2",
    ]


@pytest.mark.procs
@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": Words.HELLO},
        {"negative_prompt": Words.HELLO},
        {"key": Words.HELLO},
        {"seed": Count(3)},
        {"steps": Count(2)},
        {"num_outputs": Count(2)},
    ],
)
def test_values_of_classes_that_ranks_do_not_know(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    for kind in (Words, Count):  # a class of the caller's script
        monkeypatch.setattr(kind, "__module__", "__main__")
        monkeypatch.setattr(sys.modules["__main__"], kind.__name__, kind, raising=False)
    engine = make_engine(executor="multiproc")
    request = noop("a", **fields)
    check_noop(request, engine.submit(request).result(10))


@pytest.mark.procs
def test_a_rank_that_cannot_read_a_message_ends(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the thread that reads it would neither work nor notice its parent's end."""
    monkeypatch.setattr(Count, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Count", Count, raising=False)
    engine = make_engine(executor="multiproc", worker_extension=ECHO, patience=Patience(backoff_s=0.05))
    (pid,) = engine.health().pids
    with pytest.raises(WorkerDied, match="exit status 1"):
        engine.call("twice", Count(2), timeout_s=20)
    eventually(lambda: not alive(pid))
    assert engine.call("twice", 4, timeout_s=20) == [8]


def test_calls_that_cannot_be_made(make_engine: MakeEngine, executor: str) -> None:
    engine = make_engine(executor=executor, worker_extension=ECHO)
    for method in (None, 5):
        with pytest.raises(Unsupported, match="a method's name is a text"):
            engine.call(method)  # type: ignore[arg-type]
    for rank in (-1, 1, "a"):
        with pytest.raises(Unsupported, match="there is no rank"):
            engine.call("twice", 2, rank=rank)  # type: ignore[arg-type]
    assert engine.call("twice", 4) == [8]


@pytest.mark.procs
def test_what_cannot_travel_is_the_calls_fault(make_engine: MakeEngine) -> None:
    engine = make_engine(executor="multiproc", worker_extension=ECHO)
    with pytest.raises(Unsupported, match="the arguments of twice cannot be sent to the ranks"):
        engine.call("twice", lambda: 0)
    with pytest.raises(RowFailed, match="its value cannot be sent"):
        engine.call("lock")
    assert engine.call("twice", 4) == [8]


def test_callbacks_that_fail_end_no_engine(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()

    def leave(*_: object) -> None:
        raise SystemExit(5)

    engine.on_room(leave)
    with pytest.raises(RowFailed, match="its listener failed: SystemExit: 5"):
        engine.submit(noop("a"), on_event=leave).result(10)
    handle = engine.submit(noop("b"))
    handle.add_done_callback(leave)
    check_noop(noop("b"), handle.result(10))
    check_noop(noop("c"), engine.submit(noop("c")).result(10))
    assert not engine.health().over
    assert "a callback of request b failed" in caplog.text
    assert "somebody who watches the engine's room failed" in caplog.text


def test_a_wait_that_is_interrupted_cancels_what_it_waits_for(make_engine: MakeEngine) -> None:
    engine = make_engine(mode="step_batch")
    requests = [noop(f"r{i}", steps=100_000, sleep_s=0.001) for i in range(3)]
    threading.Thread(
        target=lambda: (
            eventually(lambda: engine.stats()["running"] == 3),
            os.kill(os.getpid(), signal.SIGINT),
        )
    ).start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests)
    assert settled(engine)["ended.aborted"] == 3


def test_replicas_closed_amid_their_work_end_without_noise(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise: list[object] = []
    monkeypatch.setattr(threading, "excepthook", noise.append)
    engine = make_engine(replicas=2, mode="request_batch")
    both = threading.Semaphore(0)
    handles = [
        engine.submit(
            noop(name, key=name, steps=100_000, sleep_s=0.001), on_event=at_step(name, 2, both.release)
        )
        for name in "ab"
    ]
    assert both.acquire(timeout=20)
    assert both.acquire(timeout=20)
    engine.close()
    assert {type(handle.error()) for handle in handles} == {EngineClosed}
    assert noise == []


@pytest.mark.procs
def test_a_fork_leaves_its_parents_engine_alone(make_engine: MakeEngine) -> None:
    engine = make_engine(executor="multiproc")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            engine.close()
            engine.submit(noop("a"))
        except EngineClosed:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    (pid,) = engine.health().pids
    check_noop(noop("b"), engine.submit(noop("b")).result(10))
    assert engine.health().pids == (pid,), "the same rank"


def test_many_threads_submit_and_cancel(make_engine: MakeEngine) -> None:
    engine = make_engine(mode="step_batch")

    def work(name: str) -> list[type | None]:
        handles = [engine.submit(noop(f"{name}{i}", key=str(i % 3), steps=3)) for i in range(30)]
        for handle in handles[::2]:
            handle.cancel()
        return [type(error) if (error := handle.wait()) else None for handle in handles]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, "abcdefgh"))
    assert all(ended is None for part in found for ended in part[1::2])
    assert {ended for part in found for ended in part} <= {None, Cancelled}
    counts = settled(engine)
    assert counts["ended.completed"] + counts.get("ended.aborted", 0) == 240
