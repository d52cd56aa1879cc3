"""A function that makes a step when it is told to."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
from saggar.engine.models.diffusers_any.paced import Paced

from tests.engine.support import eventually


def counting(made: list[int], steps: int = 5, fail_at: int = 0) -> Callable[[Callable[[], None]], str]:
    def run(step: Callable[[], None]) -> str:
        for index in range(1, steps + 1):
            if index == fail_at:
                raise ValueError("broken")
            made.append(index)
            step()
        made.append(-1)
        return "done"

    return run


def test_it_makes_the_steps_it_is_told_to_and_no_other() -> None:
    made: list[int] = []
    paced = Paced(counting(made))
    assert made == []
    paced.advance(1)
    assert made == [1]
    paced.advance(3)
    paced.advance(2)
    paced.advance(3)
    assert made == [1, 2, 3]
    assert paced.result() == "done"
    assert made == [1, 2, 3, 4, 5, -1]
    paced.advance(9)
    assert paced.result() == "done"


def test_more_steps_than_it_has_are_none() -> None:
    made: list[int] = []
    paced = Paced(counting(made, steps=2))
    for step in range(1, 6):
        paced.advance(step)
    assert paced.result() == "done"


def test_what_it_raises_is_raised_where_it_is_advanced() -> None:
    made: list[int] = []
    paced = Paced(counting(made, fail_at=3))
    paced.advance(2)
    with pytest.raises(ValueError, match="broken"):
        paced.advance(3)
    with pytest.raises(Exception, match="failed before"):
        paced.result()


def test_what_failed_is_not_kept() -> None:
    """A traceback holds the frames, and with them the memory that was too small."""

    class Large:
        pass

    alive: list[int] = []

    def run(step: Callable[[], None]) -> None:
        import weakref

        held = Large()
        weakref.finalize(held, alive.append, 1)
        step()
        raise MemoryError

    gc.disable()
    try:
        paced = Paced(run)
        paced.advance(1)
        try:
            paced.advance(2)
        except MemoryError:
            assert alive == []
        eventually(lambda: alive == [1], 10)
    finally:
        gc.enable()


def test_its_thread_ends_when_nobody_holds_it() -> None:
    made: list[int] = []
    before = set(threading.enumerate())
    paced = Paced(counting(made))
    paced.advance(2)
    (thread,) = set(threading.enumerate()) - before
    del paced
    thread.join(10)
    assert not thread.is_alive()
    assert made == [1, 2]


def test_one_that_was_never_advanced_has_no_thread() -> None:
    before = set(threading.enumerate())
    paced = Paced(counting([]))
    assert set(threading.enumerate()) <= before
    del paced
