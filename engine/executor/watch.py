"""Tells a rank that is gone or hangs from one that computes for long, and kills the first two: what follows is then
the same as for any death.

A rank is gone when its pulse stopped and it used no processor time either: a library may hold up every thread of
Python for a while, but not without working. It hangs when one verb takes far longer than it ever did.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from saggar.engine.config import Patience
from saggar.engine.executor.rank import RankProcess
from saggar.engine.worker.pulse import Pulse, Slowest

_DATAGRAM = 1 << 18


@dataclass
class Judge:
    """One rank's case. Pure: times are passed in. `serving` is False while it loads and warms up."""

    patience: Patience
    slowest: Slowest
    now: float
    serving: bool = False
    _pulse: Pulse = field(default_factory=Pulse)
    _pulse_at: float = field(init=False)
    _sign_at: float = field(init=False)
    _work: int = -1

    def __post_init__(self) -> None:
        self._pulse_at = self._sign_at = self.now

    def hear(self, pulse: Pulse, now: float) -> None:
        """A pulse came."""
        self._pulse, self._pulse_at, self._sign_at = pulse, now, now
        for name, seconds in pulse.slowest.items():
            self.slowest.add(name, seconds)

    def see(self, work: int, now: float) -> None:
        """`work` is any number that grows while the process works."""
        if work != self._work:
            self._work, self._sign_at = work, now

    def verdict(self, now: float) -> str | None:
        """Why the rank is lost, None while it is not."""
        silent = now - self._sign_at
        if silent > self.patience.silence_s:
            return f"no sign of life for {silent:.0f} s"
        if not self.serving or not self._pulse.verb:
            return None
        took, limit = self._pulse.for_s + now - self._pulse_at, self._limit()
        if took <= limit:
            return None
        return f"{self._pulse.verb} hangs: {took:.0f} s, {limit:.0f} s at most ({self._pulse.shape})"

    def _limit(self) -> float:
        seen = self.slowest.of(self._pulse.kind)
        if seen is None:
            return max(self.patience.progress_s, self.patience.first_s)
        return max(self.patience.progress_s, self.patience.progress_factor * seen)


class Watch:
    """A thread that reads pulses and condemns ranks; `slowest` outlives it, so that a new group knows what its
    predecessors learned.
    """

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        patience: Patience,
        slowest: Slowest,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._every_s = patience.pulse_s
        self._cases = {rank.pulse.fileno(): (rank, Judge(patience, slowest, clock())) for rank in ranks}
        self._bell, self._ringer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="saggar-watch", daemon=True)
        self._thread.start()

    def serving(self) -> None:
        """The ranks are ready: from now on a verb can hang."""
        for _, judge in self._cases.values():
            judge.serving = True

    def close(self) -> None:
        """Before the ranks' sockets are closed. Again: nothing happens."""
        self._ringer.close()
        self._thread.join()
        self._bell.close()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        for fd in self._cases:
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(self._every_s * 1000)}
            if self._bell.fileno() in ready:
                return
            for fd in ready:
                self._read(fd)
            for rank, judge in self._cases.values():
                self._look(rank, judge)

    def _read(self, fd: int) -> None:
        rank, judge = self._cases[fd]
        with contextlib.suppress(BlockingIOError):
            judge.hear(Pulse.unpack(rank.pulse.recv(_DATAGRAM)), self._clock())

    def _look(self, rank: RankProcess, judge: Judge) -> None:
        judge.see(work_of(rank.pid), self._clock())
        reason = judge.verdict(self._clock())
        if reason is not None:
            rank.condemn(f"rank {rank.number} (process {rank.pid}) is lost: {reason}")


def work_of(pid: int) -> int:
    """Processor time of a process in the system's ticks, 0 where the system does not say.

    One that waits for a disk or for its turn works too: its answer is another one each time.
    """
    try:
        fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return 0
    return time.monotonic_ns() if fields[0] in "DR" else int(fields[11]) + int(fields[12])
