"""The bell of a process's lanes: a pub/sub connection that says when to look again.

A bell may be missed (its connection breaks, nobody rings): whoever listens also looks once a second.
"""

import socket
from collections.abc import Iterable
from typing import Any

from saggar.jobs.lanes.store import LaneStore


class Bell:
    """Used by one thread: the one that consumes."""

    def __init__(self, store: LaneStore) -> None:
        self._store = store
        self._pubsub: Any = None  # redis-py leaves it half typed
        self._channels: set[str] = set()

    def listen(self, lanes: Iterable[str]) -> None:
        """Subscribes to these lanes and no others; nothing happens when it already is."""
        wanted = {self._store.bell(lane) for lane in lanes}
        if wanted == self._channels:
            return
        if self._pubsub is None:
            self._pubsub = self._store.client.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
        if new := wanted - self._channels:
            self._pubsub.subscribe(*new)
        if old := self._channels - wanted:
            self._pubsub.unsubscribe(*old)
        self._channels = wanted

    @property
    def socket(self) -> socket.socket | None:
        """What becomes readable when it rings; another one after a reconnection."""
        sock: socket.socket | None = getattr(self._pubsub and self._pubsub.connection, "_sock", None)
        return sock

    def heard(self) -> bool:
        """Whether it rang since the last time; does not wait.

        Raises redis.ConnectionError when the connection is lost; `close` then, and `listen` anew.
        """
        rung = False
        while self._pubsub is not None and self._channels:
            message = self._pubsub.get_message(timeout=0)
            if message is None:
                # Subscriptions confirmed and pings answered are None too, with more perhaps behind them.
                connection = self._pubsub.connection
                if connection is None or not connection.can_read(timeout=0):
                    break
                continue
            rung = True
        return rung

    def close(self) -> None:
        if self._pubsub is not None:
            self._pubsub.close()
        self._pubsub, self._channels = None, set()
