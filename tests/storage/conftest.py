"""Both stores behind one fixture, so that the contract is one suite."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from saggar.storage.base import Storage, StorageSettings
from saggar.storage.local import LocalStorage
from saggar.storage.s3 import S3Storage

from tests.support.weed import S3Server


@pytest.fixture
def s3_store(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Storage]:
    """A prefix of its own in the real server's bucket."""
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    storage = S3Storage(s3_server.bucket, f"test/{uuid.uuid4().hex}", StorageSettings.from_env())
    yield storage
    storage.close()


@pytest.fixture
def local_store(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "objects")


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.e2e)])
def store(request: pytest.FixtureRequest) -> Storage:
    return request.getfixturevalue(f"{request.param}_store")
