"""`saggar worker`: keeps one Celery worker process running, and ends when told.

The child is a process of its own because an engine that has gone wrong (a hung driver, an out-of-memory kill) must not
take the one that restarts it along. The child notices the supervisor's death by its standard input closing.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from saggar.workers.signals import SignalInbox

if TYPE_CHECKING:
    from saggar.workers.settings import WorkerSettings
    from saggar.workers.watchdog import Watchdog

log = logging.getLogger("saggar.supervisor")

# The child's exit status for "starting again would end the same way" (sysexits.h: EX_CONFIG).
REFUSED = 78
CANNOT_START = "cannot start: "  # then its log says why
_LOOK_S = 5.0  # the child's end is a signal: this is the net
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

    @classmethod
    def of(cls, settings: WorkerSettings, environ: Mapping[str, str]) -> Self:
        """For a worker with these settings; `environ` hands them on."""
        watchdog = None
        if settings.role == "model" and settings.watchdog_s:
            from saggar.workers.watchdog import Watchdog

            watchdog = Watchdog(settings.jobs, settings.name, settings.watchdog_s)
        return cls(environ, settings.grace_s, settings.max_restarts, watchdog=watchdog)

    def run(self) -> int:
        """Blocks until the worker has ended for good; its exit status. In the main thread only."""
        inbox = SignalInbox()
        crashes: deque[float] = deque()
        while True:
            status = self._run_once(inbox)
            if inbox.asked_to_stop or status in (0, REFUSED):
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
            if _told_within(pause, inbox):
                return 0

    def _run_once(self, inbox: SignalInbox) -> int:
        child = subprocess.Popen(
            [sys.executable, "-m", "saggar.workers.lifecycle"],
            env=dict(self.environ),
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which passes it on in order
        )
        over = threading.Event()
        if self.watchdog is not None:
            threading.Thread(target=self.watchdog.watch, args=(child, over), daemon=True).start()
        try:
            return self._wait(child, over, inbox)
        finally:
            over.set()

    def _wait(self, child: subprocess.Popen[bytes], over: threading.Event, inbox: SignalInbox) -> int:
        """The child's exit status; each signal is passed on as a SIGTERM, also one that came between two children."""
        passed_on, deadline = 0, math.inf
        while (status := child.poll()) is None:
            if passed_on < inbox.asked_to_stop:
                passed_on = inbox.asked_to_stop
                over.set()  # it may take its time to end: the watchdog has no say any more
                deadline = min(deadline, time.monotonic() + self.grace_s + 2.0)
                child.terminate()
            if time.monotonic() > deadline or inbox.seen[signal.SIGINT] > 1:
                log.error("the worker did not end in time: killing it")
                child.kill()
                child.wait()
                return 1
            inbox.wait(min(_LOOK_S, deadline - time.monotonic()))
        return status


def _told_within(seconds: float, inbox: SignalInbox) -> bool:
    """Whether somebody wants an end, after so long at most."""
    end = time.monotonic() + seconds
    while not inbox.asked_to_stop and (left := end - time.monotonic()) > 0:
        inbox.wait(left)
    return inbox.asked_to_stop > 0


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
