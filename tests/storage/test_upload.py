"""Uploads outlast an outage, end when nobody wants them, and say so when they cannot succeed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from saggar.storage.base import ObjectInfo, Storage
from saggar.storage.errors import Conflict, StorageRefused, StorageUnavailable
from saggar.storage.files import Data
from saggar.storage.local import LocalStorage
from saggar.storage.patience import Patience
from saggar.storage.retry import Backoff
from saggar.storage.s3 import S3Storage
from saggar.storage.spool import Spool, SpoolEntry, SpoolItem
from saggar.storage.upload import upload_entry

from tests.support.weed import S3Server

QUICK = Backoff(base_s=0.001, cap_s=0.01)


class Flaky(LocalStorage):
    """Raises `error` on the first `failures` puts; `failed` is set at the first."""

    def __init__(self, root: Path, failures: int, error: Exception | None = None) -> None:
        super().__init__(root)
        self.failures = failures
        self.failed = threading.Event()
        self.error = error or StorageUnavailable("away")

    def put(self, key: str, data: Data, *, content_type: str, metadata=None) -> ObjectInfo:
        if self.failures > 0:
            self.failures -= 1
            self.failed.set()
            raise self.error
        return super().put(key, data, content_type=content_type, metadata=metadata)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", 1 << 20)


def entry_of(spool: Spool, number: int = 0) -> SpoolEntry:
    items = [SpoolItem(f"out/j{number}/a1/{i}", b"%d-%d" % (number, i), "image/png") for i in range(3)]
    return spool.write(f"j{number}", 1, items)


def assert_uploaded(storage: Storage, entry: SpoolEntry) -> None:
    for file in entry.files:
        assert storage.get(file.key) == entry.path(file).read_bytes()


def test_everything_goes_up_and_the_entry_stays(spool: Spool, store: Storage) -> None:
    entry = entry_of(spool)
    infos = upload_entry(store, entry, keep_going=lambda: True, patience=Patience(store))
    assert [info.sha256 for info in infos] == [file.sha256 for file in entry.files]
    assert_uploaded(store, entry)
    assert spool.used_bytes == entry.size


def test_an_outage_fails_nothing(spool: Spool, tmp_path: Path) -> None:
    storage, entry = Flaky(tmp_path / "objects", failures=50), entry_of(spool)
    upload_entry(storage, entry, keep_going=lambda: True, patience=Patience(storage, QUICK))
    assert_uploaded(storage, entry)


def test_it_ends_when_nobody_wants_it(spool: Spool, tmp_path: Path) -> None:
    storage, asked = Flaky(tmp_path / "objects", failures=1000), []

    def until_the_lease_is_lost() -> bool:
        asked.append(1)
        return len(asked) < 5

    with pytest.raises(StorageUnavailable):
        upload_entry(
            storage, entry_of(spool), keep_going=until_the_lease_is_lost, patience=Patience(storage, QUICK)
        )
    assert len(asked) == 5


class Closed(LocalStorage):
    """Refuses what is under `out/`."""

    def put(self, key: str, data: Data, *, content_type: str, metadata=None) -> ObjectInfo:
        if key.startswith("out/"):
            raise StorageRefused("no")
        return super().put(key, data, content_type=content_type, metadata=metadata)


def test_a_refusal_of_these_objects_alone_is_final(spool: Spool, tmp_path: Path) -> None:
    storage = Closed(tmp_path / "objects")
    with pytest.raises(StorageRefused):
        upload_entry(storage, entry_of(spool), keep_going=lambda: True, patience=Patience(storage))


def test_bytes_that_changed_on_the_disk_are_not_passed_off(spool: Spool, local_store: LocalStorage) -> None:
    entry = entry_of(spool)
    entry.path(entry.files[1]).write_bytes(b"rotten")
    with pytest.raises(Conflict):
        upload_entry(local_store, entry, keep_going=lambda: True, patience=Patience(local_store))


def test_a_stop_ends_a_wait_between_two_tries_at_once(spool: Spool, tmp_path: Path) -> None:
    storage, stop = Flaky(tmp_path / "objects", failures=10**9), threading.Event()
    hours = Backoff(base_s=3600, cap_s=3600)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(
            upload_entry,
            storage,
            entry_of(spool),
            keep_going=lambda: True,
            patience=Patience(storage, hours),
            stop=stop,
        )
        assert storage.failed.wait(10)
        stop.set()
        assert isinstance(future.exception(10), StorageUnavailable)


@pytest.mark.e2e
def test_uploads_go_on_when_a_killed_server_is_back(
    spool: Spool, s3_store: S3Storage, s3_server: S3Server
) -> None:
    failed = threading.Event()

    def still_wanted() -> bool:
        failed.set()
        return True

    patience = Patience(s3_store, Backoff(base_s=0.1, cap_s=1.0))

    def upload(entry: SpoolEntry) -> None:
        upload_entry(s3_store, entry, keep_going=still_wanted, patience=patience)

    before = [entry_of(spool, number) for number in range(5)]
    during = [entry_of(spool, number) for number in range(5, 40)]
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(upload, entry) for entry in before]:
            future.result(30)
        futures = [pool.submit(upload, entry) for entry in during]
        futures[0].result(30)
        s3_server.kill()
        try:
            assert failed.wait(60), "an upload met the outage"
        finally:
            s3_server.start()
        for future in futures:
            future.result(60)
    for entry in before + during:
        assert_uploaded(s3_store, entry)
