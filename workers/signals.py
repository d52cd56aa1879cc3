"""Signals as something to wait for.

A handler may interrupt its own thread while that one holds any lock, an Event's included: here it only counts, and
whoever waits does the rest. Nothing is looked at while nothing happens.
"""

from __future__ import annotations

import select
import signal
import socket
from collections import Counter
from types import FrameType


class SignalInbox:
    """Takes over SIGTERM, SIGINT and SIGCHLD of the main thread, in which it must be made."""

    def __init__(self) -> None:
        self.seen: Counter[int] = Counter()
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, self._count)

    @property
    def asked_to_stop(self) -> int:
        """How often SIGTERM or SIGINT came."""
        return self.seen[signal.SIGTERM] + self.seen[signal.SIGINT]

    def wait(self, seconds: float) -> None:
        """Until a signal comes or has come since the last call; at most so long."""
        if select.select([self._reader], [], [], max(0.0, seconds))[0]:
            self._reader.recv(4096)

    def _count(self, number: int, _frame: FrameType | None) -> None:
        self.seen[number] += 1
