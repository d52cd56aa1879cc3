"""Housekeeping of the store: whose objects go, and what happens after a sweep that failed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import fakeredis
import pytest
import redis
from saggar.jobs.ledger import Ledger
from saggar.storage.base import ObjectInfo
from saggar.storage.errors import StorageUnavailable
from saggar.storage.local import LocalStorage
from saggar.workers.housekeeping import Housekeeper

from tests.jobs.samples import SETTINGS, make_job, make_result, submit
from tests.storage.test_results import made

HOUR = 3600
TWO_DAYS = 48 * HOUR


class Store(LocalStorage):
    """Counts listings and looks for abandoned uploads; a listing raises `error`."""

    error: Exception | None = None
    listings = 0
    looks = 0

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.listings += 1
        if self.error is not None:
            raise self.error
        return super().list(prefix)

    def abandon_uploads(self, before: datetime) -> int:
        self.looks += 1
        return super().abandon_uploads(before)


@pytest.fixture
def client() -> Iterator[redis.Redis]:
    with fakeredis.FakeRedis(decode_responses=True) as client:
        yield client


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "objects")


@pytest.fixture
def keeper(client: redis.Redis, store: Store) -> Iterator[Housekeeper]:
    """Its rounds are called for by the tests."""
    keeper = Housekeeper(client, SETTINGS, store, every_s=HOUR)
    yield keeper
    keeper.close()


def lock_s(client: redis.Redis, store: Store) -> int:
    return int(str(client.ttl(f"{SETTINGS.key_prefix}swept:{store.url}")))


def test_only_what_ended_without_a_result_is_swept(
    client: redis.Redis, store: Store, keeper: Housekeeper, tmp_path: Path
) -> None:
    ledger = Ledger(client, SETTINGS)
    for job_id in ("queued", "running", "won", "cancelled"):
        submit(ledger, make_job(id=job_id))
    for job_id in ("running", "won"):
        ledger.start(job_id, "worker")
    assert ledger.commit("won", 1, make_result(1))
    ledger.cancel("cancelled")
    submit(ledger, make_job(id="newer"))
    ledger.cancel("newer")
    client.set("saggar:spec:newer", '{"version": 2}')
    for job_id in ("queued", "running", "won", "cancelled", "of-another-cluster", "no=job", "newer"):
        made(store, 1, job_id=job_id)
    then = time.time() - TWO_DAYS
    for path in (tmp_path / "objects").rglob("*.*"):
        os.utime(path, (then, then))
    keeper.look_after()
    left = {info.key.split("/")[1] for info in store.list("")}
    assert left == {"queued", "running", "won", "of-another-cluster", "no=job", "newer"}


def test_a_store_is_swept_twice_a_day_whoever_asks(
    client: redis.Redis, store: Store, keeper: Housekeeper
) -> None:
    for _ in range(3):
        keeper.look_after()
    assert (store.listings, store.looks) == (1, 1)
    assert 11 * HOUR < lock_s(client, store) <= 12 * HOUR


def test_a_sweep_that_failed_is_tried_again_within_the_hour(
    client: redis.Redis, store: Store, keeper: Housekeeper
) -> None:
    store.error = StorageUnavailable("away")
    with pytest.raises(StorageUnavailable):
        keeper.look_after()
    assert 0 < lock_s(client, store) <= HOUR
    keeper.look_after()
    assert store.listings == 1, "not at every round"
    client.delete(f"{SETTINGS.key_prefix}swept:{store.url}")  # as time would
    store.error = None
    keeper.look_after()
    assert store.listings == 2
    assert lock_s(client, store) > 11 * HOUR
