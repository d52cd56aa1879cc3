"""Celery's consumer with two habits changed.

It comes back to a Redis within seconds, however long that was away: Celery waits two seconds longer after each failed
try, up to thirty, and has no setting for it. And what ends while the worker stops is acknowledged at once: Celery
leaves that to the event loop, which no longer turns, and a worker that must leave in a hurry would give back what is
done.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from celery.worker import state
from celery.worker.consumer import Consumer as CeleryConsumer

if TYPE_CHECKING:
    from kombu import Connection

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 3.0


class Consumer(CeleryConsumer):  # type: ignore[misc]
    """Named in the application's `worker_consumer`."""

    def ensure_connected(self, conn: Connection) -> Connection:
        """Connects, for as long as it takes."""
        conn.ensure_connection = partial(
            conn.ensure_connection,
            interval_start=FIRST_PAUSE_S,
            interval_step=FIRST_PAUSE_S,
            interval_max=LONGEST_PAUSE_S,
        )
        return super().ensure_connected(conn)

    def call_soon_ack(self, p: Callable[..., object], *args: object, **kwargs: object) -> object:
        """In the thread of the task, once nobody fetches any more."""
        if state.should_stop is None:
            return super().call_soon_ack(p, *args, **kwargs)
        return p(*args, **kwargs)
