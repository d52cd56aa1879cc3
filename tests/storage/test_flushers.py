"""fsync side by side: each once, each with its own answer."""

from __future__ import annotations

import errno
import os
import threading

import pytest
from saggar.storage.flushers import Flushers


@pytest.mark.parametrize("count", [0, 1, 3, 4, 50])
def test_each_is_flushed_once_and_answers_for_itself(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    flushed: list[int] = []

    def fsync(descriptor: int) -> None:
        flushed.append(descriptor)
        if descriptor % 10 == 7:
            raise OSError(errno.EIO, f"{descriptor} is broken")

    monkeypatch.setattr(os, "fsync", fsync)
    flushers = Flushers(4)
    errors = flushers.flush(range(count))
    assert sorted(flushed) == list(range(count))
    assert [error is not None for error in errors] == [number % 10 == 7 for number in range(count)]
    assert all(error is None or str(number) in str(error) for number, error in enumerate(errors))
    flushers.close()
    flushers.close()


def test_they_wait_side_by_side_for_several_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many at once as there are threads; two callers share them."""
    together = threading.Barrier(4, timeout=20)
    monkeypatch.setattr(os, "fsync", lambda _: together.wait())
    flushers = Flushers(3)  # two threads and the caller's own
    answers: list[list[OSError | None]] = []
    callers = [
        threading.Thread(target=lambda: answers.append(flushers.flush([1, 2, 3, 4]))) for _ in range(2)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(20)
    assert answers == [[None] * 4] * 2
    flushers.close()
