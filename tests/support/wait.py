"""Waiting for conditions: the one place where tests look again and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_PAUSE_S = 0.02


def until(condition: Callable[[], T], timeout_s: float = 30.0, what: str = "the condition") -> T:
    """The condition's first true value; AssertionError once the time is over."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s} s"
        time.sleep(_PAUSE_S)
    return value
