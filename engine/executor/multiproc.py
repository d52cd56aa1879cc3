"""The model in a process of its own: the engine's process stays free of torch and outlives the model's end.

A rank is a fresh interpreter, never a fork. It ends when its channel closes, so nothing of it survives
this process. A restart after a death has its place in `start`, which may be called again after `close`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable

from saggar.engine.config import EngineConfig
from saggar.engine.errors import WorkerDied
from saggar.engine.executor.base import Health
from saggar.engine.worker.channel import Channel, ChannelClosed
from saggar.engine.worker.plan import (
    Call,
    Cancel,
    Failed,
    Plan,
    Ready,
    Reply,
    Report,
    Shutdown,
    Start,
    Stepped,
)
from saggar.engine.worker.runner import OnStep

_TICK_S = 0.25
_END_S = 5.0
_DEFAULTS = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    # Threads that wait for each other by spinning are 30 times slower where others want the same cores.
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""The rank's environment where this process's own says nothing else."""


class MultiprocExecutor:
    """See executor.base.Executor."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._rank: _Rank | None = None

    def start(self) -> Ready:
        """Start the rank and wait until it is ready, however long it loads. Raises what stopped it."""
        self._rank = _Rank(Start(self._config, 0))
        message = self._rank.receive(lambda: None)
        if isinstance(message, Ready):
            return message
        raise _unexpected(message)

    def execute(self, plan: Plan, on_step: OnStep) -> Report:
        """Send the plan, pass on its steps, return its report. WorkerDied once the rank has ended."""
        rank = self._started()
        rank.send(plan)
        while not isinstance(message := rank.receive(lambda: on_step(())), Report):
            if not isinstance(message, Stepped):
                raise _unexpected(message)
            on_step(message.rows)
        return message

    def cancel(self, plan_id: int, request_ids: Iterable[str]) -> None:
        """A message of its own, which the rank reads during a forward."""
        ids = tuple(request_ids)
        if ids and self._rank is not None and self._rank.exit_text() is None:
            with contextlib.suppress(WorkerDied):  # `execute` finds the same and tells every request
                self._rank.send(Cancel(plan_id, ids))

    def call(self, call: Call) -> list[Reply]:
        """One message each way."""
        rank = self._started()
        rank.send(call)
        message = rank.receive(lambda: None)
        if isinstance(message, Reply):
            return [message]
        raise _unexpected(message)

    def health(self) -> Health:
        """Whether the rank's process lives."""
        if self._rank is None:
            return Health(False, (), "not started")
        text = self._rank.exit_text()
        return Health(text is None, (self._rank.pid,), text or "")

    def close(self) -> None:
        """Ask the rank to end, and kill it if it does not within a few seconds."""
        if self._rank is not None:
            self._rank.end()

    def _started(self) -> _Rank:
        assert self._rank is not None, "start first"
        return self._rank


class _Rank:
    """One process and our end of its channel."""

    def __init__(self, start: Start) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "saggar.engine.worker.process", str(theirs.fileno())]
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_DEFAULTS | os.environ,
                start_new_session=True,  # a terminal's Ctrl-C is for the parent alone
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self._channel = Channel(ours)
        self._poll = select.poll()
        self._poll.register(self._channel.fileno(), select.POLLIN)
        self.send(sys.path)
        self.send(start)

    def send(self, message: object) -> None:
        """WorkerDied if the process has ended."""
        try:
            self._channel.send(message)
        except ChannelClosed:
            raise self._died() from None

    def receive(self, idle: Callable[[], None]) -> object:
        """The next message; calls `idle` now and then while there is none. WorkerDied."""
        while not self._poll.poll(_TICK_S * 1000):
            if self._process.poll() is not None:
                raise self._died()
            idle()
        try:
            return self._channel.receive()
        except ChannelClosed:
            raise self._died() from None

    def exit_text(self) -> str | None:
        """How the process ended, None while it lives."""
        status = self._process.poll()
        if status is None:
            return None
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return f"the rank's process {self.pid} has ended ({how})"

    def end(self) -> None:
        """Shut down, by force if need be; frees the channel."""
        with contextlib.suppress(ChannelClosed):  # it may have ended already
            self._channel.send(Shutdown())
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._channel.close()

    def _died(self) -> WorkerDied:
        """The channel is closed: the process has ended or is about to."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return WorkerDied(self.exit_text() or f"the rank's process {self.pid} has ended")


def _unexpected(message: object) -> Exception:
    if isinstance(message, Failed):
        return message.error
    return AssertionError(f"a rank sent {type(message).__name__}")
