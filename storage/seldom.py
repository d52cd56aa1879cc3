"""What would be told again and again is told once in a while."""

from __future__ import annotations

import threading
import time


class Seldom:
    """Threads share it: whichever comes first after `every_s` seconds is the one that tells."""

    def __init__(self, every_s: float = 60.0) -> None:
        self._every_s = every_s
        self._lock = threading.Lock()
        self._told: float | None = None

    def due(self) -> bool:
        """Whether to tell now; the time until the next begins then."""
        with self._lock:
            now = time.monotonic()
            if self._told is not None and now - self._told < self._every_s:
                return False
            self._told = now
            return True
