"""Input files on their way into the store: by content once, and by a URL that takes one PUT and no other."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest
from saggar.storage import Storage, StorageConfigError, uploads
from saggar.storage.errors import Conflict
from saggar.storage.local import LocalStorage
from saggar.storage.s3 import S3Storage
from saggar.storage.uploads import grant_upload, put_upload, upload_key

PICTURE = b"\x89PNG and what follows"


def test_equal_content_is_there_once(store: Storage, tmp_path: Path) -> None:
    for name in ("a.png", "b.PNG", "c"):
        (tmp_path / name).write_bytes(PICTURE)
    first, again, bare = (put_upload(store, tmp_path / name) for name in ("a.png", "b.PNG", "c"))
    assert first == again == f"{store.url}/{upload_key(tmp_path / 'a.png')}"
    assert bare == first.removesuffix(".png")
    assert store.get(upload_key(tmp_path / "a.png")) == PICTURE
    assert sorted(info.key for info in store.list("uploads/")) == [
        upload_key(tmp_path / "c"),
        upload_key(tmp_path / "a.png"),
    ]
    found = store.head(upload_key(tmp_path / "a.png"))
    assert found is not None
    modified = found.modified
    put_upload(store, tmp_path / "b.PNG")
    found = store.head(upload_key(tmp_path / "a.png"))
    assert found is not None
    assert found.modified == modified, "it is not written again"


def test_a_file_that_changes_as_it_is_sent_is_not_there_under_its_old_name(
    store: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PICTURE)
    key = upload_key(path)
    monkeypatch.setattr(uploads, "upload_key", lambda path: path.write_bytes(b"others") and key)
    with pytest.raises(Conflict, match="changed while it was sent"):
        put_upload(store, path)
    assert store.head(key) is None


def test_a_folder_has_no_url(tmp_path: Path) -> None:
    with pytest.raises(StorageConfigError, match="a folder has no URL"):
        grant_upload(LocalStorage(tmp_path), "png", 10)


@pytest.mark.parametrize(
    ("extension", "size", "says"),
    [
        ("exe", 1, "'exe' is no upload's extension"),
        ("png", 0, "not 0"),
        ("png", 6 << 30, "an upload has 1 to"),
    ],
)
def test_a_grant_for_anything_else_is_refused(extension: str, size: int, says: str, tmp_path: Path) -> None:
    with pytest.raises(StorageConfigError, match=says):
        grant_upload(LocalStorage(tmp_path), extension, size)


@pytest.mark.e2e
def test_a_grant_takes_one_file_of_one_kind_and_size(s3_store: S3Storage) -> None:
    grant = grant_upload(s3_store, "png", len(PICTURE), expires_s=60)
    assert grant.uri.startswith(f"{s3_store.url}/uploads/") and grant.uri.endswith(".png")
    key = grant.uri.removeprefix(f"{s3_store.url}/")
    for data, content_type in ((PICTURE + b"!", "image/png"), (PICTURE, "text/html")):
        with pytest.raises(urllib.error.HTTPError) as refused:
            send(grant.url, data, content_type)
        assert refused.value.code == 403
        assert s3_store.head(key) is None
    assert send(grant.url, PICTURE, grant.headers["Content-Type"]) == 200
    assert s3_store.get(key) == PICTURE
    found = s3_store.head(key)
    assert found is not None
    assert found.content_type == "image/png"


def send(url: str, data: bytes, content_type: str) -> int:
    request = urllib.request.Request(url, data, {"Content-Type": content_type}, method="PUT")
    with urllib.request.urlopen(request) as answer:
        return answer.status
