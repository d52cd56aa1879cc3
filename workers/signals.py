"""Signals as something to wait for.

A handler may interrupt its own thread while that one holds any lock, an Event's included: here it only counts, and
whoever waits does the rest. Nothing is looked at while nothing happens.
"""

from __future__ import annotations

import select
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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


@contextmanager
def uninterrupted() -> Iterator[None]:
    """In the main thread a signal whose handler may raise is held back until the end: a process that was just started
    is in nobody's hands yet. Not by a mask, which the process would inherit."""
    held: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        raising = [one for one in _ENDING if callable(signal.getsignal(one))]
        before = {one: signal.signal(one, lambda number, _frame: held.append(number)) for one in raising}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        if held:
            signal.raise_signal(held[0])


class StoppedBySignal(KeyboardInterrupt):
    """A signal that ends processes came; `number` is which."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """In the main thread SIGTERM and SIGHUP, like Ctrl-C, raise: what was started is stopped on the way out. Those that
    whoever started this process has taken over or ignores (nohup) stay so. Of several the first counts."""
    mine: list[signal.Signals] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        for one in mine:
            signal.signal(one, signal.SIG_IGN)
        raise StoppedBySignal(number)

    if threading.current_thread() is threading.main_thread():
        mine += [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    for one in mine:
        signal.signal(one, stop)
    try:
        yield
    finally:
        for one in mine:
            signal.signal(one, signal.SIG_DFL)
