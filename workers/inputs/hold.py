"""The inputs of a job in hand: fetched while its attempt is wanted; its seats in the engine are not kept for long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from saggar.engine.handle import Reservation
from saggar.jobs.schema import Job
from saggar.workers.attempts import Attempt
from saggar.workers.inputs.fetch import Ticket
from saggar.workers.inputs.load import InputLoader, Inputs

SEATS_S = 2.0
"""As long as the engine holds a batch open for who is on the way: a slow host takes nobody's seat."""


@contextmanager
def fetched(
    loader: InputLoader, job: Job, attempt: Attempt, reservation: Reservation | None
) -> Iterator[Inputs]:
    """The job's inputs, held until the end. Raises as `InputLoader.held`; Stopped when the attempt was told to stop."""
    if not job.has_inputs:
        yield {}
        return
    ticket = Ticket()
    attempt.take(ticket)
    late = threading.Timer(SEATS_S, reservation.release) if reservation is not None else None
    if late is not None:
        late.daemon = True
        late.start()
    try:
        with loader.held(job, ticket) as inputs:
            if late is not None:
                late.cancel()
            yield inputs
    finally:
        if late is not None:
            late.cancel()
