"""The rank's process: its start, its death, signals, and that nothing of it is left."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
from saggar.engine import Engine, EngineConfig, LoadError, Unsupported, WorkerDied
from saggar.engine.models.noop import colour

from tests.engine.conftest import MakeEngine
from tests.engine.support import alive, at_step, check_noop, eventually, noop, settled
from tests.support.memory import named_segments

pytestmark = pytest.mark.procs


def ranks() -> list[psutil.Process]:
    """Rank processes of this one."""
    return [
        child
        for child in psutil.Process().children()
        if "saggar.engine.worker.process" in " ".join(child.cmdline())
    ]


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine(executor="multiproc", reservation_hold_s=0.1)


def test_requests_run_in_another_process_and_come_back_whole(engine: Engine) -> None:
    assert engine.health().ok
    assert engine.health().pids != (os.getpid(),)
    requests = [noop(f"r{i}", num_outputs=1 + i % 3, key=str(i % 2), steps=1 + i % 4) for i in range(40)]
    for request, output in zip(requests, engine.generate(requests), strict=True):
        check_noop(request, output)


def test_large_outputs_are_whole_and_writable(engine: Engine) -> None:
    request = noop("large", height=4096, width=5461, num_outputs=2)
    output = engine.submit(request).result(60)
    assert output.images[0].nbytes > 64_000_000
    for index, picture in enumerate(output.images):
        assert (picture[::97, ::89] == colour(request.prompt, 7 + index).astype(np.uint8)).all()
        picture[0, 0] = 0


def test_an_error_in_one_row_comes_back_and_the_rank_lives(engine: Engine) -> None:
    engine.pause()
    good, bad = (
        engine.submit(noop("good")),
        engine.submit(noop("bad", fail_at="predict", fail_text="cracked")),
    )
    engine.resume()
    assert str(bad.wait()) == "ValueError: cracked"
    check_noop(noop("good"), good.result(10))
    assert engine.health().ok


@pytest.mark.parametrize("mode", ["request_batch", "step_batch"])
def test_a_cancel_is_not_behind_a_running_plan(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(executor="multiproc", mode=mode)
    started = threading.Event()
    handle = engine.submit(noop("a", steps=100_000, sleep_s=0.01), on_event=at_step("a", 2, started.set))
    assert started.wait(20)
    assert handle.cancel()
    assert type(handle.wait()).__name__ == "Cancelled"
    check_noop(noop("b"), engine.submit(noop("b")).result(10))
    again = engine.submit(noop("a"))
    check_noop(noop("a"), again.result(10))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_ranks_death_is_told_and_made_good(engine: Engine, how: signal.Signals) -> None:
    started = threading.Event()
    running = engine.submit(noop("a", steps=50, sleep_s=0.01), on_event=at_step("a", 1, started.set))
    waiting = engine.submit(noop("b", key="other"))
    assert started.wait(20)
    (before,) = engine.health().pids
    os.kill(before, how)
    eventually(lambda: not engine.health().ok, timeout_s=2)
    assert f"killed by {how.name}" in engine.health().reason
    for handle in (running, waiting):
        check_noop(noop(handle.id), handle.result(20))
    assert engine.health().ok
    assert engine.health().pids != (before,)


def test_a_death_between_requests_is_made_good_without_a_request(engine: Engine) -> None:
    engine.generate([noop("a")])
    room = threading.Event()
    engine.on_room(room.set)
    os.kill(engine.health().pids[0], signal.SIGKILL)
    eventually(lambda: not engine.health().ok, timeout_s=2)
    assert room.wait(20)
    assert engine.room().seats == engine.config.max_batch
    check_noop(noop("b"), engine.submit(noop("b")).result(20))


def test_a_death_while_loading_fails_the_start(models: Callable[[str], Path]) -> None:
    model = str(models("flux"))  # made here: that may take longer than anybody waits for a rank
    before = len(ranks())
    errors: list[BaseException] = []

    def start() -> None:
        try:
            Engine.make(EngineConfig(model=model))
        except WorkerDied as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    eventually(lambda: len(ranks()) > before)
    ranks()[-1].kill()
    thread.join(30)
    assert [str(error).partition("(")[2] for error in errors] == ["killed by SIGKILL)"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ranks_leave_stopping_to_their_parent(engine: Engine, how: signal.Signals) -> None:
    started = threading.Event()
    handle = engine.submit(noop("a", steps=60, sleep_s=0.005), on_event=at_step("a", 2, started.set))
    assert started.wait(20)
    os.kill(engine.health().pids[0], how)
    check_noop(noop("a"), handle.result(20))
    assert engine.health().ok


def test_a_model_that_cannot_load_fails_the_start_with_its_reason(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "NoopPipeline"}')
    (tmp_path / "saggar.json").write_text('{"params": {"fail_at": {"default": "decode"}}}')
    before = ranks()
    with pytest.raises(LoadError, match="the warm-up failed: ValueError: asked to fail"):
        Engine.make(EngineConfig(model=str(tmp_path)))
    with pytest.raises(Unsupported, match="device cuda:7"):
        Engine.make(EngineConfig(model=str(models("sd3")), device="cuda:7"))
    eventually(lambda: len(ranks()) == len(before))


def test_a_wrong_setting_is_told_without_a_traceback(
    models: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Unsupported, match=r"there is no kernel 'nosuch', but .*torch_sdpa"):
        Engine.make(EngineConfig(model=str(models("sd3")), attention={"default": "nosuch"}))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("times", "settings"),
    [
        (6, {}),
        (2, {"ranks": 2, "replicas": 2}),
        pytest.param(100, {}, marks=pytest.mark.soak),
        pytest.param(25, {"ranks": 2, "replicas": 2}, marks=pytest.mark.soak),
    ],
)
def test_starts_and_closes_leave_nothing(
    models: Callable[[str], Path], times: int, settings: dict[str, Any]
) -> None:
    def start_and_close(kill: bool = False) -> None:
        with Engine.make(EngineConfig(model=str(models("noop")), **settings)) as engine:
            engine.generate([noop("a", height=512, width=512), noop("b", height=2000, width=2000)])
            if kill:
                os.kill(engine.health().pids[-1], signal.SIGKILL)
                engine.generate([noop("c")])

    def held() -> tuple[int, int, int, list[str]]:
        me = psutil.Process()
        return me.num_fds(), threading.active_count(), len(ranks()), sorted(named_segments())

    start_and_close()
    gc.collect()  # what other tests have left to it would go in between
    before = held()
    for time in range(times):
        start_and_close(kill=time % 3 == 0)
    gc.collect()
    assert held() == before


SCRIPT = """
import sys, threading
from saggar.engine import Engine, EngineConfig, Request
with Engine.make(EngineConfig(model=sys.argv[1])) as engine:
    def told(event):
        if event.kind == "step" and event.step == 2:
            print(engine.health().pids[0], flush=True)
    engine.submit(Request("a", "x", params={"steps": 100000, "sleep_s": 0.01}), on_event=told).result()
"""


def child(models: Callable[[str], Path]) -> tuple[subprocess.Popen[str], int]:
    """A process with an engine in the middle of a request, and its rank's pid."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(models("noop"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_damaged_model_is_told_without_a_traceback(
    models: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(models("sd3"), tmp_path / "sd3"))
    next((folder / "transformer").glob("*.safetensors")).unlink()
    with pytest.raises(LoadError, match="transformer: there are no weights in safetensors"):
        Engine.make(EngineConfig(model=str(folder)))
    assert "Traceback" not in capfd.readouterr().err


def test_the_rank_ends_when_its_parent_is_killed(models: Callable[[str], Path]) -> None:
    process, rank = child(models)
    assert alive(rank)
    process.kill()
    process.communicate()
    eventually(lambda: not alive(rank))


def test_ctrl_c_closes_the_engine_and_its_rank(models: Callable[[str], Path]) -> None:
    process, rank = child(models)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    assert errors.count("Traceback") == 1
    assert process.returncode != 0
    eventually(lambda: not alive(rank))


def test_a_rank_whose_parent_was_interrupted_as_it_started_says_nothing() -> None:
    ours, control = socket.socketpair()
    pulses, pulse = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with control, pulses, pulse:
        ours.close()
        fds = [control.fileno(), pulse.fileno()]
        done = subprocess.run(
            [sys.executable, "-m", "saggar.engine.worker.process", *map(str, fds)],
            pass_fds=fds,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (0, "")


IMPORTS = """
import sys
from saggar.engine import Engine, EngineConfig, Request, open_family
family, model, executor = sys.argv[1:]
info = open_family(model).info("x", 8)
assert info.params_schema["properties"], info
with Engine.make(EngineConfig(model=model, executor=executor, threads=1)) as engine:
    steps = "steps" if family == "noop" else "num_inference_steps"
    output = engine.submit(Request("a", "x", params={steps: 2})).result(60)
    assert output.images[0].shape == (64, 64, 3)
heavy = {"torch", "diffusers", "transformers", "celery", "redis", "boto3", "kombu"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    ("family", "executor"), [("noop", "local"), ("noop", "multiproc"), ("sd3", "multiproc")]
)
def test_the_engines_process_never_imports_torch(
    models: Callable[[str], Path], family: str, executor: str
) -> None:
    command = [sys.executable, "-c", IMPORTS, family, str(models(family)), executor]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_slow_turn_does_not_stop_deadlines(engine: Engine) -> None:
    slow: list[Any] = [engine.submit(noop("slow", steps=1, sleep_s=2.0))]
    eventually(lambda: engine.stats()["running"] == 1)
    waiting = engine.submit(noop("waiting", key="other", deadline_s=0.05))
    assert type(waiting.wait()).__name__ == "DeadlineExceeded"
    assert not slow[0].done()
    slow[0].result(20)
    assert settled(engine)["ended.aborted"] == 1
