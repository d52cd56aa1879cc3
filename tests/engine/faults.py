"""Ranks that fail on order: an extension that spoils a verb of its rank for requests whose prompt asks for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from saggar.engine.models.base import Family
from saggar.engine.models.state import RequestState, Row
from saggar.engine.worker.extension import Extension

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

    how: kill, stop, raise, exit, hang, or a number of seconds to wait.
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
    elif how == "hang":
        time.sleep(3600)
    else:
        time.sleep(float(how))
