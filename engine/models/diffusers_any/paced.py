"""A function in a thread of its own that stands still at each of its steps until it is told to make the next.

It gives a loop that is not ours, such as that of a whole pipeline, the borders between steps that the engine needs:
progress is told there and a cancel takes effect.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
Run = Callable[[Callable[[], None]], T]
"""The function; it is handed what it has to call after each of its steps."""
_TO_THE_END = float("inf")


class Abandoned(Exception):
    """Nobody wants the result any more; raised in the thread, from its step."""


class Paced(Generic[T]):
    """The thread begins with the first `advance`. When the last reference goes, it ends at its next step."""

    def __init__(self, run: Run[T]) -> None:
        self._core = _Core(run)
        self._begun = False
        # The thread knows the core alone, so that this object's end is seen.
        weakref.finalize(self, self._core.abandon)

    def advance(self, step: int) -> None:
        """Return once that step, counted from 1, is made, or the function has returned. Raises what it raised."""
        self._begin()
        self._core.advance(step)

    def result(self) -> T:
        """Let it run to its end; what it returned. Raises what it raised."""
        self._begin()
        return self._core.result()

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._core.work, name="saggar-pipeline", daemon=True).start()


class _Core(Generic[T]):
    """What both threads share, under one condition."""

    def __init__(self, run: Run[T]) -> None:
        self._run: Run[T] | None = run
        self._changed = threading.Condition()
        self._allowed: float = 0
        self._made = 0
        self._over = False
        self._abandoned = False
        self._results: list[T] = []
        self._error: BaseException | None = None

    def work(self) -> None:
        """The thread's life."""
        run, self._run = self._run, None
        assert run is not None
        try:
            self._results = [run(self._step)]
        except BaseException as error:  # noqa: BLE001  (raised where the result is asked for)
            self._error = error
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def advance(self, step: float) -> None:
        with self._changed:
            self._allowed = max(self._allowed, step)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._over or self._made >= step)
            error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # or this frame would keep it, and with it the memory of all that failed
        if self._over and not self._results:
            raise Abandoned("it has failed before")

    def result(self) -> T:
        self.advance(_TO_THE_END)
        return self._results[0]

    def abandon(self) -> None:
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def _step(self) -> None:
        """A step is made; wait until the next may be."""
        with self._changed:
            self._made += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._abandoned or self._made < self._allowed)
            if self._abandoned:
                raise Abandoned
