"""The supervisor's eye on its child: a worker that neither fetches nor shows a sign of life while jobs wait is ended.

What it goes by stands in Redis, where every fetch and every heartbeat of a worker that holds jobs leaves its time. So a
long video is no reason, nor is an empty lane, nor a Redis that is away, nor a model that still loads.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import redis
from saggar.jobs.cards import Cards
from saggar.jobs.lanes import LaneStore, lane_name
from saggar.jobs.settings import JobSettings, connect

log = logging.getLogger(__name__)
LOOKS = 12  # within the time of patience


@dataclass(frozen=True, slots=True)
class Sight:
    """One look at a worker. `work`: jobs wait, or are in its hands. `sign`: when it was last heard of, if ever."""

    work: bool
    sign: float | None


class Watchdog:
    """Watches one child at a time; `patience_s` is how long it may do nothing."""

    def __init__(
        self,
        settings: JobSettings,
        model: str,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = connect(settings.model_copy(update={"socket_timeout_s": 5.0}))
        self._cards = Cards(self._client, settings)
        self._model = model
        self._store = LaneStore(self._client, settings.key_prefix)
        self._lane = lane_name(model)
        self._patience_s = patience_s
        self._clock = clock
        self._since = 0.0
        self._last: Sight | None = None

    def watch(self, child: subprocess.Popen[bytes], over: threading.Event) -> None:
        """Until `over`; kills the child when it is stuck. In a thread of its own."""
        owner = None
        self._last = None
        while not over.wait(self._patience_s / LOOKS):
            try:
                owner = owner or self._owner(child.pid)
                if owner is None or not self.stuck(self._look(owner)):
                    continue
            except redis.RedisError:
                self._last = None  # nobody fetches from a Redis that is away
                continue
            if not over.is_set():
                log.error("the worker did nothing for %.0f s while jobs waited: killing it", self._patience_s)
                child.kill()
            return

    def stuck(self, sight: Sight) -> bool:
        """Whether this look, after those before it, says so."""
        now = self._clock()
        if self._last != sight or not sight.work:
            self._since = now
        self._last = sight
        return now - self._since >= self._patience_s

    def _owner(self, pid: int) -> str | None:
        """The name under which the child holds jobs; None while it still loads."""
        start = f"{socket.gethostname()}:{pid}:"
        return next((name for name in self._cards.workers_of(self._model) if name.startswith(start)), None)

    def _look(self, owner: str) -> Sight:
        base = self._store.base(self._lane)
        pipe = self._client.pipeline(transaction=False)
        pipe.zscore(f"{base}:p", owner)
        pipe.scard(f"{base}:o:{owner}")
        sign, held = cast("tuple[float | None, int]", tuple(pipe.execute()))
        return Sight(held > 0 or self._store.size(self._lane).waiting > 0, sign)
