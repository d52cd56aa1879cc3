"""Trying again after StorageUnavailable: full jitter, which spreads the load of many clients after an outage.

Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015:
pause = random(0, min(cap, base · 2ⁿ)).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import TypeVar

from saggar.storage.errors import StorageUnavailable

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Times in seconds."""

    base_s: float = 0.2
    cap_s: float = 5.0

    def pause_s(self, failures: int) -> float:
        """A random pause after the n-th failure in a row (from 1)."""
        return random.uniform(0, min(self.cap_s, self.base_s * 2 ** min(failures - 1, 30)))


def retrying(
    call: Callable[[], Result],
    keep_going: Callable[[int], bool],
    *,
    backoff: Backoff,
    stop: Event | None = None,
) -> Result:
    """Call until it succeeds. After each StorageUnavailable `keep_going(failures in a row)` is asked.

    Raises the last StorageUnavailable when told to give up or when `stop` is set; other errors pass at once.
    """
    bell = stop or Event()
    failures = 0
    while True:
        try:
            return call()
        except StorageUnavailable:
            failures += 1
            if not keep_going(failures) or bell.wait(backoff.pause_s(failures)):
                raise
