"""A bar of steps and requests for `Engine.generate`; silent where standard error is no terminal."""

from __future__ import annotations

import sys
import threading

from saggar.engine.request import EngineEvent

_WIDTH = 30


class Bar:
    """Counts events; `show` False counts without drawing."""

    def __init__(self, requests: int, show: bool) -> None:
        self._requests = requests
        self._show = show and sys.stderr.isatty()
        self._lock = threading.Lock()
        self._steps: dict[str, tuple[int, int]] = {}
        self._done = 0

    def __call__(self, event: EngineEvent) -> None:
        """Take in an event of one of the requests."""
        with self._lock:
            self._steps[event.request_id] = (event.step, event.steps)
            self._done += event.kind in ("output", "error")
            if self._show:
                print(
                    f"\r{self.line()}",
                    end="\n" if self._done == self._requests else "",
                    file=sys.stderr,
                    flush=True,
                )

    def line(self) -> str:
        """`[#######.....] 3/8 requests, 41/96 steps`."""
        step = sum(done for done, _ in self._steps.values())
        steps = sum(total for _, total in self._steps.values())
        filled = _WIDTH * self._done // max(1, self._requests)
        bar = "#" * filled + "." * (_WIDTH - filled)
        return f"[{bar}] {self._done}/{self._requests} requests, {step}/{steps} steps"
