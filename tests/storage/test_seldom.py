"""What is told once in a while."""

from __future__ import annotations

import pytest
from saggar.storage import seldom
from saggar.storage.seldom import Seldom


def test_it_is_told_at_once_and_then_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]  # as on a machine that was started just now
    monkeypatch.setattr(seldom.time, "monotonic", lambda: now[0])
    telling = Seldom(60.0)
    told = []
    for at in (0, 1, 59, 60, 61, 119, 200):
        now[0] = at
        if telling.due():
            told.append(at)
    assert told == [0, 60, 200]
