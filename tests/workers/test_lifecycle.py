"""What a worker says while it waits for its store."""

from __future__ import annotations

import pytest
from saggar.jobs.settings import JobSettings
from saggar.storage.errors import StorageUnavailable
from saggar.storage.retry import Backoff
from saggar.workers.lifecycle import ModelWorker
from saggar.workers.settings import WorkerSettings


class Away:
    """A store that answers after so many probes."""

    def __init__(self, probes: int) -> None:
        self.probes = probes

    def probe(self) -> bool:
        self.probes -= 1
        if self.probes:
            raise StorageUnavailable("nobody is there")
        return True


def test_that_its_store_is_away_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Backoff, "pause_s", lambda *_: 0)
    store = Away(20)
    ModelWorker(WorkerSettings(jobs=JobSettings()))._wait_for_store(store)  # type: ignore[arg-type]
    assert store.probes == 0
    assert [record.getMessage() for record in caplog.records] == [
        "the store cannot be reached, trying again: nobody is there"
    ]
