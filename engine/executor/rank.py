"""One rank seen from outside: its process, the channel to it and the socket of its pulses.

A rank is a fresh interpreter, never a fork. It ends when its channel closes, so nothing of it survives this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from saggar.engine.errors import WorkerDied
from saggar.engine.worker.channel import Channel, ChannelClosed
from saggar.engine.worker.plan import Shutdown, Start

_END_S = 5.0
_DEFAULTS = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    # Threads that wait for each other by spinning are 30 times slower where others want the same cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    # The ranks of a group share a machine; its name may lead elsewhere.
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
}
"""The rank's environment where this process's own says nothing else."""


class Rank:
    """Starts the process. `links` are its ends of channels to other ranks; they stay open here."""

    def __init__(self, start: Start, links: Sequence[socket.socket] = ()) -> None:
        self.number = start.rank
        self._verdict: str | None = None
        self._judging = threading.Lock()
        control, theirs = socket.socketpair()
        self.pulse, pulsing = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.pulse.setblocking(False)
        fds = [end.fileno() for end in (theirs, pulsing, *links)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "saggar.engine.worker.process", *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                env=_DEFAULTS | os.environ,
                start_new_session=True,  # a terminal's Ctrl-C is for the parent alone
            )
        except BaseException:
            control.close()
            self.pulse.close()
            raise
        finally:
            theirs.close()
            pulsing.close()
        self.pid = self._process.pid
        self._channel = Channel(control)

    def fileno(self) -> int:
        """For waiting for its messages."""
        return self._channel.fileno()

    def begin(self, start: Start) -> None:
        """Tell it what to be. WorkerDied."""
        self.send(sys.path)
        self.send(start)

    def send(self, message: object) -> None:
        """WorkerDied if the process has ended."""
        try:
            self._channel.send(message)
        except ChannelClosed:
            raise self._died() from None

    def receive(self) -> object:
        """The next message. WorkerDied."""
        try:
            return self._channel.receive()
        except ChannelClosed:
            raise self._died() from None

    def exit_text(self) -> str | None:
        """How the process ended, None while it lives."""
        status = self._process.poll()
        if status is None:
            return self._verdict
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
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
        self._free()

    def dismiss(self) -> None:
        """Ask it to end; `end` waits for that."""
        with contextlib.suppress(ChannelClosed):  # it may have ended already
            self._channel.send(Shutdown())

    def end(self) -> None:
        """Wait for its end, and kill it if it takes too long; frees everything."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self.kill()

    def _free(self) -> None:
        self._channel.close()
        self.pulse.close()

    def _died(self) -> WorkerDied:
        """The channel is closed: the process has ended or is about to."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return WorkerDied(self.exit_text() or f"the rank's process {self.pid} has ended")
