"""The files of jobs in hand: what is fetched for one, and how long its seats in the engine wait for that."""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

from saggar.engine.handle import Handle, Reservation
from saggar.jobs.schema import Job
from saggar.workers.attempts import Attempt, Stoppable
from saggar.workers.inputs.fetch import Ticket
from saggar.workers.inputs.load import InputLoader, Inputs

SEATS_S = 2.0
"""As long as the engine holds a batch open for who is on the way: a slow host takes nobody's seat."""
_LATE = 0.1
"""Of that time: how much later a seat may go back. A thread for each would cost more than fetching a small file."""


class Files:
    """Threads share it."""

    def __init__(self, loader: InputLoader, seats_s: float = SEATS_S) -> None:
        self._loader = loader
        self._seats = Seats(seats_s)

    def expect(self, attempt: Attempt, fetching: Stoppable, reservation: Reservation | None) -> None:
        """The job's files are about to be fetched, which `fetching` ends; the seats are kept for a while."""
        attempt.take(fetching)
        if reservation is not None:
            self._seats.keep(reservation)

    def entered(self, job: Job, ticket: Ticket, enter: Callable[[Inputs], Handle]) -> Handle:
        """What `enter` made of the fetched files, which count as held until that has ended.

        Raises as InputLoader.held and `enter`.
        """
        try:
            with ExitStack() as stack:
                handle = enter(stack.enter_context(self._loader.held(job, ticket)))
                held = stack.pop_all()
        except BaseException as error:
            _forget_frames(error)
            raise
        handle.add_done_callback(lambda _: held.close())
        return handle


def _forget_frames(error: BaseException | None) -> None:
    """An error is kept for a while, and its traceback with the arrays of the files that were good."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Seats:
    """Gives seats back after a while; whoever has arrived by then has used his. Thread-safe."""

    def __init__(self, after_s: float = SEATS_S) -> None:
        self._after_s = after_s
        self._kept: deque[tuple[float, Reservation]] = deque()
        self._lock = threading.Lock()

    def keep(self, reservation: Reservation) -> None:
        """From now on."""
        with self._lock:
            self._kept.append((time.monotonic() + self._after_s, reservation))
            if len(self._kept) == 1:
                self._wake_after(self._after_s)

    def _wake_after(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._give_back)
        timer.daemon = True
        timer.start()

    def _give_back(self) -> None:
        now, due = time.monotonic(), []
        with self._lock:
            while self._kept and self._kept[0][0] <= now:
                due.append(self._kept.popleft()[1])
            if self._kept:
                self._wake_after(max(self._kept[0][0] - now, self._after_s * _LATE))
        for reservation in due:
            reservation.release()
