"""The thread that tells how far attempts are."""

from __future__ import annotations

import fakeredis
import pytest
from saggar.jobs.ledger.ledger import Ledger
from saggar.jobs.settings import JobSettings
from saggar.workers.attempts import Attempts


def test_a_close_in_the_middle_of_a_pulse_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bell rang before the thread cleared it: seen as a worker that did not end."""

    def closed_meanwhile(attempts: Attempts) -> None:
        attempts._closed.set()
        attempts._bell.set()

    monkeypatch.setattr(Attempts, "pulse", closed_meanwhile)
    attempts = Attempts(Ledger(fakeredis.FakeRedis(decode_responses=True), JobSettings()), pulse_s=0.02)
    attempts._thread.join(20)
    assert not attempts._thread.is_alive()
