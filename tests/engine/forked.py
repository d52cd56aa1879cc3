"""Ranks that are forks of one process in which the libraries are imported already: the long matrix starts a thousand.

The process that forks is multiprocessing's fork server, a fresh interpreter that computes nothing. What a rank runs is
what a fresh one runs, `saggar.engine.worker.process.main`, in a process of its own that no other test has used.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import connection, get_context, reduction
from types import SimpleNamespace
from typing import Any

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["tests.engine.forked_preload"])


class Inherited:
    """Open files that go to the fork with the object."""

    def __init__(self, files: Sequence[int]) -> None:
        self.files = files

    def __getstate__(self) -> list[Any]:
        return [reduction.DupFd(file) for file in self.files]  # type: ignore[no-untyped-call]

    def __setstate__(self, copies: list[Any]) -> None:
        self.files = [copy.detach() for copy in copies]


def live(inherited: Inherited, environ: dict[str, str]) -> None:
    """A rank's life in the fork. It ends as the process does, without a clean-up that takes longer than the work."""
    from saggar.engine.worker import process

    os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    status = process.main(*inherited.files)  # type: ignore[arg-type]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Fork:
    """What executor/rank.py needs of subprocess.Popen."""

    def __init__(
        self, command: Sequence[str], *, pass_fds: Sequence[int], env: dict[str, str], **_: Any
    ) -> None:
        assert command[1:3] == ["-m", "saggar.engine.worker.process"], command
        assert list(command[3:]) == [str(file) for file in pass_fds]
        self._process = FORKS.Process(target=live, args=(Inherited(pass_fds), env), daemon=True)
        self._process.start()
        self._asking = threading.Lock()  # the status can be read once, and two threads ask
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it lives."""
        with self._asking:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """subprocess.TimeoutExpired."""
        if not connection.wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def kill(self) -> None:
        """End it now."""
        with self._asking:
            self._process.kill()


INSTEAD = SimpleNamespace(Popen=Fork, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
"""For `subprocess` in executor/rank.py."""
