"""`saggar worker`: keeps one Celery worker process running, and ends when told.

The child is a process of its own because an engine that has gone wrong (a hung driver, an out-of-memory kill) must not
take the one that restarts it along. The child notices the supervisor's death by its standard input closing.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from saggar.workers.settings import WorkerSettings
    from saggar.workers.watchdog import Watchdog

log = logging.getLogger("saggar.supervisor")

# The child's exit status for "starting again would end the same way" (sysexits.h: EX_CONFIG).
REFUSED = 78
LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"


@dataclass
class Supervisor:
    """Runs `python -m saggar.workers.lifecycle` with an environment, and again when it crashed.

    `grace_s` is what the child may take after SIGTERM; two seconds later it is killed. More than `max_restarts` crashes
    within `window_s` seconds end the supervisor with the child's status: something outside must look.
    """

    environ: Mapping[str, str]
    grace_s: float
    max_restarts: int = 5
    window_s: float = 600.0
    watchdog: Watchdog | None = None
    _child: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _stopping: threading.Event = field(default_factory=threading.Event, repr=False)
    _interrupts: int = 0

    @classmethod
    def of(cls, settings: WorkerSettings, environ: Mapping[str, str]) -> Self:
        """For a worker with these settings; `environ` hands them on."""
        watchdog = None
        if settings.role == "model" and settings.watchdog_s:
            from saggar.workers.watchdog import Watchdog

            watchdog = Watchdog(settings.jobs, settings.name, settings.watchdog_s)
        return cls(environ, settings.grace_s, settings.max_restarts, watchdog=watchdog)

    def run(self) -> int:
        """Blocks until the worker has ended for good; its exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        crashes: deque[float] = deque()
        while True:
            status = self._run_once()
            if self._stopping.is_set() or status in (0, REFUSED):
                return 0 if status == -signal.SIGTERM else status  # it was still loading
            now = time.monotonic()
            crashes.append(now)
            while crashes[0] < now - self.window_s:
                crashes.popleft()
            if len(crashes) > self.max_restarts:
                log.error("the worker crashed %d times in %.0f s: giving up", len(crashes), self.window_s)
                return status if status > 0 else 128 - status  # as a shell says it
            pause = min(0.5 * 2 ** (len(crashes) - 1), 15.0)
            log.error("the worker ended with status %d: starting it again in %.1f s", status, pause)
            if self._stopping.wait(pause):
                return 0

    def _run_once(self) -> int:
        child = subprocess.Popen(
            [sys.executable, "-m", "saggar.workers.lifecycle"],
            env=dict(self.environ),
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which passes it on in order
        )
        self._child = child
        if self._stopping.is_set():  # the signal came between two children
            child.terminate()
        over = threading.Event()
        if self.watchdog is not None:
            threading.Thread(target=self.watchdog.watch, args=(child, over), daemon=True).start()
        try:
            return self._wait(child, over)
        finally:
            over.set()

    def _wait(self, child: subprocess.Popen[bytes], over: threading.Event) -> int:
        deadline: float | None = None
        while True:
            try:
                return child.wait(0.2)
            except subprocess.TimeoutExpired:
                if not self._stopping.is_set():
                    continue
                over.set()  # it may take its time to end: the watchdog has no say any more
                deadline = deadline or time.monotonic() + self.grace_s + 2.0
                if time.monotonic() > deadline or self._interrupts > 1:
                    log.error("the worker did not end in time: killing it")
                    child.kill()
                    child.wait()
                    return 1

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        self._stopping.set()
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)


def watch_parent() -> None:
    """Ends this process as SIGTERM would once standard input closes: whoever started it is gone."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="saggar-parent", daemon=True).start()


def main() -> int:
    """Supervises for another process of ours, which handed its settings on; ends when that one does."""
    from saggar.workers.settings import WorkerSettings

    settings = WorkerSettings.from_parent()
    logging.basicConfig(level=settings.log_level.upper(), format=LOG_FORMAT)
    watch_parent()
    return Supervisor.of(settings, os.environ).run()


if __name__ == "__main__":
    sys.exit(main())
