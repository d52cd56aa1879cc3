"""What a rank does at this moment, told each second by a thread of its own: so a rank that computes for long is
told from one that is gone, and a verb that never ends from one that takes its time.

Pulses are JSON in datagrams: each arrives whole, and a reader that falls behind never holds up the rank.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

_REMEMBERED = 1024
_NEWS = 256
"""Durations in one pulse: a datagram has its limits."""


@dataclass(frozen=True)
class Pulse:
    """The verb under way ("" for none), its shape and how long it has taken; and the slowest that verbs took which
    have ended since the last pulse, by `kind`.
    """

    verb: str = ""
    shape: str = ""
    for_s: float = 0.0
    slowest: dict[str, float] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What durations are compared by."""
        return kind(self.verb, self.shape)

    def pack(self) -> bytes:
        """As a datagram."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Pulse:
        """From a datagram."""
        return cls(**json.loads(data))


def kind(verb: str, shape: str) -> str:
    """Durations are compared within a verb and a shape."""
    return f"{verb} {shape}".rstrip()


class Slowest:
    """The longest duration by kind; the kinds that were not met for the longest time are forgotten."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> bool:
        """Remember; whether it is the longest of its kind so far."""
        before = self._seconds.pop(name, None)
        self._seconds[name] = seconds if before is None else max(before, seconds)
        if len(self._seconds) > _REMEMBERED:
            del self._seconds[next(iter(self._seconds))]
        return before is None or seconds > before

    def of(self, name: str) -> float | None:
        """Seconds, None for a kind that was never seen."""
        return self._seconds.get(name)


class Activity:
    """Written by the rank's thread, read by the one that sends pulses."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now: tuple[str, str, float] | None = None
        self._slowest = Slowest()
        self._news: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def doing(self, verb: str, shape: str = "") -> Iterator[None]:
        """A verb is under way. One that fails says nothing about how long it takes."""
        start = self._clock()
        self._now = (verb, shape, start)
        try:
            yield
            took = self._clock() - start
        finally:
            self._now = None
        name = kind(verb, shape)
        if self._slowest.add(name, took):
            with self._lock:
                self._news[name] = took

    def pulse(self) -> Pulse:
        """What is so now."""
        with self._lock:
            names = list(self._news)[:_NEWS]
            news = {name: self._news.pop(name) for name in names}
        verb, shape, start = self._now or ("", "", 0.0)
        return Pulse(verb, shape, self._clock() - start if verb else 0.0, news)


def send_pulses(sock: socket.socket, activity: Activity, every_s: float) -> None:
    """Start the thread; it ends with the process, or when nobody can read any more."""

    def beat() -> None:
        with contextlib.suppress(ConnectionError):  # the parent has gone, which the inbox notices
            while True:
                data = activity.pulse().pack()
                with contextlib.suppress(BlockingIOError):  # the reader is behind: it knows enough
                    sock.send(data, socket.MSG_DONTWAIT)
                time.sleep(every_s)

    threading.Thread(target=beat, name="saggar-pulse", daemon=True).start()
