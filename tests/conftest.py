"""Fixtures every level shares: real servers, started by the tests themselves. A missing one fails the test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from saggar.workers.servers import RedisServer

from tests.support.weed import S3Server

# Before torch is loaded anywhere: OpenMP's threads spin while they wait, and processes on few cores stand still.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell that starts the tests in the background has SIGINT ignored, and so would every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# With nohup it is SIGHUP. It ends no tests then, but a process that they start is to be as others are.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server of this session's own. Tests that kill it must start it again."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The URL of an emptied database of the session's server."""
    client = redis.Redis.from_url(redis_server.url)
    client.flushall()
    client.close()
    return redis_server.url


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A SeaweedFS server of this session's own. Tests that kill it must start it again."""
    server = S3Server(Path(tmp_path_factory.mktemp("s3")))
    server.start()
    try:
        yield server
    finally:
        server.stop()
