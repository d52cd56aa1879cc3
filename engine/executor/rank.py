"""One rank seen from outside: its process, the channel to it and the socket of its pulses.

A rank is a fresh interpreter, never a fork. It ends when its channel closes, so nothing of it survives this process.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from saggar.engine.errors import WorkerDied
from saggar.engine.executor.keyed import KEY_VARIABLE
from saggar.engine.worker.channel import Channel, ChannelClosed
from saggar.engine.worker.plan import Shutdown, Start

_END_S = 5.0
_DEFAULTS = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    # Threads that wait for each other by spinning are 30 times slower where others want the same cores.
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""The rank's environment where this process's own says nothing else."""


def same_machine() -> dict[str, str]:
    """For the environment of ranks that all live on one machine: its name may lead elsewhere."""
    return {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}


def is_loopback(host: str) -> bool:
    """Whether all nodes are this one machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Member(Protocol):
    """A rank of a group, wherever it lives. WorkerDied where it has ended."""

    number: int

    @property
    def pid(self) -> int:
        """Its process, a number of its own machine."""

    @property
    def guilty(self) -> bool:
        """Whether it ended otherwise than because the others did."""

    def fileno(self) -> int:
        """For waiting for its messages."""

    def begin(self, start: Start) -> None:
        """Tell it what to be."""

    def serving(self) -> None:
        """The group is ready."""

    def send(self, message: object) -> None:
        """One message to it."""

    def receive(self) -> object:
        """The next message from it."""

    def exit_text(self) -> str | None:
        """How it ended, None while it lives."""

    def kill(self) -> None:
        """End it now; frees everything."""

    def dismiss(self) -> None:
        """Ask it to end; `end` waits for that."""

    def end(self) -> None:
        """Wait for its end, and kill it if it takes too long; frees everything."""


class RankProcess:
    """Starts the process. `control` is its end of the channel to the engine, `links` of those to other ranks; they stay
    open here. `environ`: more of the rank's, where this process's own says nothing else.
    """

    def __init__(
        self, number: int, control: socket.socket, links: Sequence[socket.socket], environ: Mapping[str, str]
    ) -> None:
        self.number = number
        self._verdict: str | None = None
        self._judging = threading.Lock()
        self.pulse, pulsing = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.pulse.setblocking(False)
        fds = [end.fileno() for end in (control, pulsing, *links)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "saggar.engine.worker.process", *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                env=_environ(environ),
                start_new_session=True,  # a terminal's Ctrl-C is for the parent alone
            )
        except BaseException:
            self.pulse.close()
            raise
        finally:
            pulsing.close()
        self.pid = self._process.pid

    def exit_text(self) -> str | None:
        """How the process ended, None while it lives."""
        status = self._process.poll()
        if status is None:
            return self._verdict
        how = f"killed by {_named(-status)}" if status < 0 else f"exit status {status}"
        return self._verdict or f"the rank's process {self.pid} has ended ({how})"

    @property
    def guilty(self) -> bool:
        """Whether it ended otherwise than because the others did."""
        return self._verdict is not None or self._process.poll() not in (None, 0)

    def condemn(self, reason: str) -> None:
        """Kill it, for a reason that its requests will hear."""
        with self._judging:
            if self._process.poll() is None:
                self._verdict = self._verdict or reason
                self._process.kill()

    def kill(self) -> None:
        """End it now; frees everything."""
        self._process.kill()
        self._process.wait()
        self.pulse.close()

    def end(self) -> None:
        """Wait for its end, and kill it if it takes too long; frees everything."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self.kill()

    def ended(self) -> str:
        """Waits a little for its end, then kills it; how it ended."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return self.exit_text() or f"the rank's process {self.pid} has ended"


class Rank(RankProcess):
    """A rank of this machine with the channel to it."""

    def __init__(
        self, start: Start, links: Sequence[socket.socket] = (), environ: Mapping[str, str] | None = None
    ) -> None:
        control, theirs = socket.socketpair()
        try:
            super().__init__(start.rank, theirs, links, same_machine() if environ is None else environ)
        except BaseException:
            control.close()
            raise
        finally:
            theirs.close()
        self._channel = Channel(control)

    def fileno(self) -> int:
        """For waiting for its messages."""
        return self._channel.fileno()

    def begin(self, start: Start) -> None:
        """Tell it what to be. WorkerDied."""
        self.send(sys.path)
        self.send(start)

    def serving(self) -> None:
        """The watch of its own machine is told by the group."""

    def send(self, message: object) -> None:
        """WorkerDied if the process has ended."""
        try:
            self._channel.send(message)
        except ChannelClosed:
            raise WorkerDied(self.ended()) from None

    def receive(self) -> object:
        """The next message. WorkerDied."""
        try:
            return self._channel.receive()
        except ChannelClosed:
            raise WorkerDied(self.ended()) from None

    def kill(self) -> None:
        """End it now; frees everything."""
        super().kill()
        self._channel.close()

    def dismiss(self) -> None:
        """Ask it to end; `end` waits for that."""
        with contextlib.suppress(ChannelClosed):  # it may have ended already
            self._channel.send(Shutdown())


def _named(number: int) -> str:
    """A signal's name; those of real time have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _environ(own: Mapping[str, str]) -> dict[str, str]:
    """The key of the nodes is none of a rank's business."""
    found = _DEFAULTS | dict(own) | os.environ
    found.pop(KEY_VARIABLE, None)
    return found
