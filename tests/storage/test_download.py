"""Objects to files: whole or not at all, resumed, and what their digest says they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from saggar.storage import download as module
from saggar.storage.base import ObjectInfo, Storage
from saggar.storage.download import download
from saggar.storage.errors import Conflict, NotFound, StorageRefused, StorageUnavailable
from saggar.storage.local import LocalStorage
from saggar.storage.retry import Backoff

DATA = bytes(range(256)) * 20_000


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "pause_s", lambda *_: 0)


class Broken(LocalStorage):
    """Connections that break after `pieces` pieces, `failures` times; says which digest it is told to."""

    def __init__(self, root: Path, failures: int = 0, pieces: int = 1, sha256: str | None = None) -> None:
        super().__init__(root)
        self.failures, self.pieces, self.sha256 = failures, pieces, sha256
        self.starts: list[int] = []

    def read(self, key: str, start: int = 0, etag: str | None = None) -> Iterator[bytes]:
        self.starts.append(start)
        pieces = super().read(key, start, etag)
        if self.failures:
            self.failures -= 1
            for _ in range(self.pieces):
                yield next(pieces)
            raise StorageUnavailable("the connection broke")
        yield from pieces

    def head(self, key: str) -> ObjectInfo | None:
        info = super().head(key)
        return replace(info, sha256=self.sha256) if info else None


def put(storage: Storage, data: bytes = DATA) -> ObjectInfo:
    storage.put("model/weights", data, content_type="application/octet-stream")
    return next(storage.list("model/"))


def test_what_arrives_is_the_object(store: Storage, tmp_path: Path) -> None:
    told: list[int] = []
    download(store, put(store), tmp_path / "weights", told.append)
    assert (tmp_path / "weights").read_bytes() == DATA
    assert sum(told) == len(DATA)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("weights")] == ["weights"]


def test_an_empty_object(store: Storage, tmp_path: Path) -> None:
    download(store, put(store, b""), tmp_path / "weights", lambda _: None)
    assert (tmp_path / "weights").read_bytes() == b""


def test_a_broken_connection_goes_on_where_it_was(tmp_path: Path) -> None:
    storage, told = Broken(tmp_path / "store", failures=3), list[int]()
    download(storage, put(storage), tmp_path / "weights", told.append)
    assert (tmp_path / "weights").read_bytes() == DATA
    assert storage.starts == [0, 1 << 20, 2 << 20, 3 << 20]
    assert sum(told) == len(DATA)


def test_an_ended_process_is_gone_on_with(tmp_path: Path) -> None:
    storage = Broken(tmp_path / "store")
    info = put(storage)

    def stop(count: int) -> None:
        if count:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(storage, info, tmp_path / "weights", stop)
    assert not (tmp_path / "weights").exists()
    download(storage, info, tmp_path / "weights", lambda _: None)
    assert storage.starts == [0, 1 << 20]
    assert (tmp_path / "weights").read_bytes() == DATA


def test_a_store_that_sends_nothing_is_given_up(tmp_path: Path) -> None:
    storage = Broken(tmp_path / "store", failures=100, pieces=0)
    with pytest.raises(StorageUnavailable):
        download(storage, put(storage), tmp_path / "weights", lambda _: None)
    assert len(storage.starts) == module.ATTEMPTS


def test_a_spoiled_part_is_fetched_anew(tmp_path: Path) -> None:
    storage, told = Broken(tmp_path / "store", sha256=hashlib.sha256(DATA).hexdigest()), list[int]()
    info = put(storage)
    (tmp_path / "weights.part").write_bytes(b"x" * 1000)
    download(storage, info, tmp_path / "weights", told.append)
    assert (tmp_path / "weights").read_bytes() == DATA
    assert sum(told) == len(DATA)
    (tmp_path / "weights.part").write_bytes(b"x" * (len(DATA) + 1))
    download(storage, info, tmp_path / "weights", told.append)
    assert (tmp_path / "weights").read_bytes() == DATA


def test_bytes_that_are_not_the_digests_are_never_a_file(tmp_path: Path) -> None:
    storage = Broken(tmp_path / "store", sha256="0" * 64)
    with pytest.raises(StorageRefused, match="another digest than the store tells"):
        download(storage, put(storage), tmp_path / "weights", lambda _: None)
    assert storage.starts == [0, 0]
    assert not list(tmp_path.glob("weights*"))


def test_a_replaced_or_removed_object_is_no_file(store: Storage, tmp_path: Path) -> None:
    info = put(store)
    put(store, b"other")
    with pytest.raises(Conflict):
        download(store, info, tmp_path / "weights", lambda _: None)
    store.delete(["model/weights"])
    with pytest.raises(NotFound):
        download(store, info, tmp_path / "weights", lambda _: None)
