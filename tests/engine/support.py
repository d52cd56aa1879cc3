"""Helpers of the engine's tests."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
from saggar.engine import Engine, EngineEvent, Output, Request
from saggar.engine.models.noop import colour
from saggar.engine.worker.extension import Extension

from tests.support.wait import until as eventually


def noop(name: str, **fields: Any) -> Request:
    """A request of the no-op family: params by name, other fields of Request too."""
    own = {key: fields.pop(key) for key in list(fields) if key in Request.__dataclass_fields__}
    return Request(**{"id": name, "prompt": f"prompt of {name}", "seed": 7, "params": fields, **own})


def check_noop(request: Request, output: Output) -> None:
    """The output is the request's own, each picture in its place."""
    assert output.request_id == request.id
    assert output.seeds == [request.seed + index for index in range(request.num_outputs)]
    assert len(output.images) == request.num_outputs
    for seed, picture in zip(output.seeds, output.images, strict=True):
        assert picture.dtype == np.uint8
        assert (picture == colour(request.prompt, seed).astype(np.uint8)).all()


class Recorder:
    """An `on_event` that keeps what it sees, in order."""

    def __init__(self, then: Callable[[EngineEvent], None] | None = None) -> None:
        self.events: list[EngineEvent] = []
        self._then = then

    def __call__(self, event: EngineEvent) -> None:
        self.events.append(event)
        if self._then is not None:
            self._then(event)

    def kinds(self, request_id: str) -> list[str]:
        """Kinds of one request's events."""
        return [event.kind for event in self.events if event.request_id == request_id]

    def steps(self, request_id: str) -> list[int]:
        """Steps that were told of one request."""
        return [
            event.step for event in self.events if event.kind == "step" and event.request_id == request_id
        ]


def at_step(request_id: str, step: int, action: Callable[[], object]) -> Callable[[EngineEvent], None]:
    """An `on_event` that acts once, when the request has made that step."""
    done: list[bool] = []

    def watch(event: EngineEvent) -> None:
        if event.request_id == request_id and event.kind == "step" and event.step == step and not done:
            done.append(True)
            action()

    return watch


def floats(output: Output) -> np.ndarray:
    """Pictures [outputs, H, W, 3] as floats."""
    return np.stack(output.images).astype(np.float64)


class Echo(Extension):
    """An extension for tests."""

    def twice(self, value: int) -> int:
        """2 × value."""
        return 2 * value

    def pid(self) -> int:
        """The rank's process."""
        return os.getpid()

    def numbers(self, count: int) -> np.ndarray:
        """0, 1, 2 and so on, int64."""
        return np.arange(count)

    def wait(self, seconds: float) -> float:
        """Takes its time."""
        time.sleep(seconds)
        return seconds

    def touch(self, path: str) -> str:
        """Makes a file."""
        Path(path).touch()
        return path

    def lock(self) -> object:
        """Something that cannot travel."""
        return threading.Lock()

    def die(self) -> None:
        """Ends the rank's process."""
        os._exit(3)


def alive(pid: int) -> bool:
    """Whether the process runs."""
    return bool(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)


def settled(engine: Engine) -> dict[str, int]:
    """The engine's counts once nothing waits and nothing runs."""
    eventually(lambda: engine.stats()["waiting"] == 0 and engine.stats()["running"] == 0)
    return engine.stats()
