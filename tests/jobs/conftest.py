"""Redis for the tests of jobs: a fake one with real Lua for logic, a real one for time, sockets and crashes."""

from __future__ import annotations

from collections.abc import Iterator

import fakeredis
import pytest
import redis
from saggar.jobs import Cards, JobClient, JobSettings, Ledger, connect

from tests.jobs.samples import CARD, SETTINGS


@pytest.fixture
def fake() -> Iterator[redis.Redis]:
    client = fakeredis.FakeRedis(decode_responses=True)
    yield client
    client.close()


@pytest.fixture
def ledger(fake: redis.Redis) -> Ledger:
    return Ledger(fake, SETTINGS)


@pytest.fixture
def client(fake: redis.Redis) -> JobClient:
    """With the card of the sample model published."""
    Cards(fake, SETTINGS).publish(CARD, "worker-1")
    return JobClient(SETTINGS, fake)


@pytest.fixture
def real_settings(redis_url: str) -> JobSettings:
    return JobSettings.make(redis_url=redis_url)


@pytest.fixture
def real(real_settings: JobSettings) -> Iterator[redis.Redis]:
    client = connect(real_settings)
    Cards(client, real_settings).publish(CARD, "worker-1")
    yield client
    client.close()


@pytest.fixture
def real_ledger(real: redis.Redis, real_settings: JobSettings) -> Ledger:
    return Ledger(real, real_settings)


@pytest.fixture
def real_client(real: redis.Redis, real_settings: JobSettings) -> JobClient:
    return JobClient(real_settings, real)
