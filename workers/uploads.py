"""Local files that jobs shall start from: checked by their content, put into the workers' store, named by its URI."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from saggar.jobs.errors import ConfigError
from saggar.storage.base import Storage, open_storage
from saggar.storage.uploads import put_upload, upload_key
from saggar.workers.inputs.sniff import TAKEN, kind_of

_NOT_MEDIA = ("", "SVG", "HTML")


class FileError(ConfigError):
    """A local file that cannot be an input; `problem` says why, `allowed` what can."""

    def __init__(self, problem: str, allowed: str = "") -> None:
        super().__init__(f"{problem} (allowed: {allowed})" if allowed else problem)
        self.problem, self.allowed = problem, allowed


def workers_store(url: str | None) -> Storage:
    """The store that the workers write to, as given or in SAGGAR_STORE. Raises ConfigError, StorageConfigError."""
    url = url or os.environ.get("SAGGAR_STORE")
    if not url:
        raise ConfigError(
            "local input files are uploaded to the workers' store: name it by --store or SAGGAR_STORE"
        )
    return open_storage(url)


def check_file(path: Path, kind: str | None = None) -> None:
    """Raises FileError for what is no picture, video or sound: a manifest from elsewhere sends no other file away.
    With a kind of input, such as `mask`, for all that is not of its forms too."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a pipe would be waited for
            raise FileError(f"{path}: a pipe or a device", "files")
        with path.open("rb") as file:
            form = kind_of(file)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from None
    if form in _NOT_MEDIA:
        raise FileError(f"{path}: neither a picture nor a video nor a sound")
    if kind is not None and form not in TAKEN[kind]:
        raise FileError(f"{path}: {form} is no file for inputs.{kind}", ", ".join(TAKEN[kind]))


def uri_of(value: str, storage: Storage, kind: str) -> str:
    """A URI itself, or that of the local file for this kind of input, which is uploaded unless it is there.
    Raises FileError, StorageError."""
    if "://" in value:
        return value
    check_file(Path(value), kind)
    return put_upload(storage, Path(value))


def planned_uri(path: Path, storage: Storage, kind: str) -> str:
    """What `uri_of` will give; nothing is sent. Raises FileError."""
    check_file(path, kind)
    return storage.uri(upload_key(path))
