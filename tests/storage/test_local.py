"""What only a folder has to fear: links, a full disk, what a crash leaves behind."""

from __future__ import annotations

import errno
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from saggar.storage.base import StorageSettings, open_storage
from saggar.storage.errors import (
    InvalidKey,
    StorageConfigError,
    StorageRefused,
    StorageUnavailable,
)
from saggar.storage.local import LocalStorage


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "objects"


def test_a_linked_folder_leads_nowhere(local_store: LocalStorage, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("s")
    (root / "job").symlink_to(outside)
    for call in (local_store.get, local_store.head, lambda key: local_store.delete([key])):
        with pytest.raises(InvalidKey):
            call("job/secret")
    with pytest.raises(InvalidKey):
        local_store.put("job/new", b"x", content_type="text/plain")
    assert sorted(os.listdir(outside)) == ["secret"]
    assert list(local_store.list("")) == []


def test_a_linked_file_is_neither_read_nor_written_through(
    local_store: LocalStorage, root: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (root / "key").symlink_to(victim)
    with pytest.raises(InvalidKey):
        local_store.get("key")
    assert local_store.put_if_absent("key", b"x", content_type="text/plain") is False
    local_store.put("key", b"mine", content_type="text/plain")
    assert victim.read_text() == "untouched"
    assert local_store.get("key") == b"mine"


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    LocalStorage(tmp_path / "link").put("k", b"v", content_type="text/plain")
    assert (tmp_path / "disk" / "k").read_bytes() == b"v"


def test_a_key_below_a_file_is_refused(local_store: LocalStorage) -> None:
    local_store.put("a", b"x", content_type="text/plain")
    with pytest.raises(InvalidKey):
        local_store.put("a/b", b"x", content_type="text/plain")


@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.ENOSPC, StorageUnavailable), (errno.EIO, StorageUnavailable), (errno.EROFS, StorageRefused)],
)
def test_a_disk_that_fails_leaves_nothing(
    local_store: LocalStorage,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    expected: type[Exception],
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(expected):
        local_store.put("key", b"x", content_type="text/plain")
    assert local_store.head("key") is None
    assert os.listdir(root / ".tmp") == []


def test_old_temporary_files_are_swept(local_store: LocalStorage, root: Path) -> None:
    (root / ".tmp" / "left-by-a-crash").write_bytes(b"half")
    now = datetime.now(UTC)
    assert local_store.abandon_uploads(now - timedelta(days=1)) == 0
    assert local_store.abandon_uploads(now + timedelta(seconds=5)) == 1
    assert os.listdir(root / ".tmp") == []


def test_a_store_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageConfigError):
        LocalStorage(tmp_path / "file" / "objects")


@pytest.mark.parametrize(
    "url", ["", "ftp://host/x", "file://relative", "s3://", "s3:///key", "s3://A_B/x", "http://h/b"]
)
def test_wrong_urls_are_one_clear_error(url: str) -> None:
    with pytest.raises(StorageConfigError):
        open_storage(url, StorageSettings())


@pytest.mark.parametrize(
    "url", ["s3://key:hunter2@bucket/x", "https://key:hunter2@host/bucket", "file://a:hunter2@b/c"]
)
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(StorageConfigError, match="holds no user and no password") as caught:
        open_storage(url, StorageSettings())
    assert "hunter2" not in str(caught.value)


def test_urls_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        open_storage("out").url
        == open_storage((tmp_path / "out").as_uri()).url
        == (tmp_path / "out").as_uri()
    )
    spaced = open_storage(str(tmp_path / "a b"))
    spaced.put("k", b"v", content_type="text/plain")
    assert open_storage(spaced.url).get("k") == b"v"


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"SAGGAR_S3_PATH_STYLE": "perhaps"}, "SAGGAR_S3_PATH_STYLE"),
        ({"SAGGAR_S3_MAX_CONNECTIONS": "0"}, "SAGGAR_S3_MAX_CONNECTIONS"),
        ({"SAGGAR_S3_CHECKSUMS": "never"}, "SAGGAR_S3_CHECKSUMS"),
        ({"SAGGAR_S3_ENDPIONT": "http://x"}, "SAGGAR_S3_ENDPIONT"),
    ],
)
def test_wrong_settings_name_the_variable(env: dict[str, str], named: str) -> None:
    with pytest.raises(StorageConfigError, match=named):
        StorageSettings.from_env(env)


def test_settings_from_the_environment() -> None:
    settings = StorageSettings.from_env(
        {"SAGGAR_S3_ENDPOINT": "http://h:1", "SAGGAR_S3_PATH_STYLE": "1", "SAGGAR_S3_REGION": "", "HOME": "/"}
    )
    assert settings == StorageSettings(endpoint="http://h:1", path_style=True)


def test_an_empty_variable_is_not_set() -> None:
    names = ["ENDPIONT", *map(str.upper, StorageSettings.model_fields)]
    assert StorageSettings.from_env({f"SAGGAR_S3_{name}": "" for name in names}) == StorageSettings()
