"""Ranks that fail on order: an extension that spoils a verb of its rank for requests whose prompt asks for it."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from saggar.engine.config import EngineConfig
from saggar.engine.models.base import Family
from saggar.engine.models.state import RequestState, Row
from saggar.engine.worker.extension import Extension
from saggar.engine.worker.plan import Start

FAULTS = "tests.engine.faults.Faults"
FOLDER = "SAGGAR_TEST_FAULTS"
"""Names the folder of the files that say what happened how often."""
VERBS = {
    "encode": "prepare_encode",
    "predict": "predict",
    "combine": "combine",
    "step": "step_scheduler",
    "decode": "post_decode",
}


def order(verb: str, how: str, rank: int = 0, times: int = 1) -> str:
    """The prompt of a request that has `how` done to a rank in a verb, so many times in all.

    how: kill, stop, raise, memory, exit, hang, or a number of seconds to wait.
    """
    return f"fault {verb} {how} {rank} {times}"


class Faults(Extension):
    """Wraps the verbs of the family. With a file `warm-up` in the folder each start takes an order from it."""

    def __init__(self, family: Family[Any, Any, Any], rank: int) -> None:
        super().__init__(family, rank)
        for verb, name in VERBS.items():
            setattr(family, name, partial(self._spoilt, verb, getattr(family, name)))

    def _spoilt(self, verb: str, original: Callable[..., Any], *args: Any) -> Any:
        for prompt in _prompts(args):
            self._obey(verb, prompt)
        return original(*args)

    def _obey(self, verb: str, prompt: str) -> None:
        if prompt == "warm-up":
            script = Path(os.environ[FOLDER]) / "warm-up"
            prompt = script.read_text() if script.exists() else ""
        words = prompt.split()
        meant = words[:1] == ["fault"] and words[1] == verb and int(words[3]) == self.rank
        if meant and _claim(prompt, int(words[4])):
            _do(words[2])


def _other_weights(family: Family[Any, Any, Any]) -> None:
    family.checkpoint.__dict__["revision"] = "another"


def _other_tokens(family: Family[Any, Any, Any]) -> None:
    vars(importlib.import_module("saggar.engine.models.common"))["_PROBE"] = "another"


def _other_noise(family: Family[Any, Any, Any]) -> None:
    vars(importlib.import_module("saggar.engine.models.noop"))["colour"] = lambda prompt, seed: np.zeros(3)


def _other_numerics(family: Family[Any, Any, Any]) -> None:
    cpu = importlib.import_module("saggar.engine.platform.cpu").Cpu
    cpu.default_dtype = lambda self: importlib.import_module("torch").bfloat16


def _other_versions(family: Family[Any, Any, Any]) -> None:
    agreement = importlib.import_module("saggar.engine.worker.agreement")
    vars(agreement)["version"] = lambda name: "0.0.7"


def _as_it_is(family: Family[Any, Any, Any]) -> None:
    """For what the rank is told: see `told_otherwise`."""


DIFFERENCES = {
    "weights": _other_weights,
    "tokens": _other_tokens,
    "noise": _other_noise,
    "numerics": _other_numerics,
    "versions": _other_versions,
    "plan": _as_it_is,
}


class Differs(Extension):
    """The last rank has something else than the others: what, stands in the file `differs` of the folder."""

    def __init__(self, family: Family[Any, Any, Any], rank: int) -> None:
        super().__init__(family, rank)
        if rank == 1:
            DIFFERENCES[(Path(os.environ[FOLDER]) / "differs").read_text()](family)


def told_otherwise(config: EngineConfig, rank: int, *more: Any) -> Start:
    """Stands in for Start: rank 1 is told of other batches."""
    return Start(replace(config, max_batch=3) if rank == 1 else config, rank, *more)


def _prompts(args: Sequence[Any]) -> set[str]:
    found = set()
    for arg in args:
        for item in arg if isinstance(arg, list | tuple) else [arg]:
            state = item.state if isinstance(item, Row) else item
            if isinstance(state, RequestState):
                found.add(state.request.prompt)
    return found


def _claim(name: str, times: int) -> bool:
    """Whether this is still to be done; counted in files, for the process may not outlive it."""
    for index in range(times):
        try:
            (Path(os.environ[FOLDER]) / f"{name} {index}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return True
    return False


def _do(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "exit":
        os._exit(3)
    elif how == "raise":
        raise RuntimeError("asked to fail")
    elif how == "memory":
        raise MemoryError("asked to fail")
    elif how == "hang":
        time.sleep(3600)
    else:
        time.sleep(float(how))
