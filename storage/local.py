"""A local folder as a store, with S3's rules: whole objects, durable once acknowledged, created once.

An object is written under `.tmp` in the root, flushed, then renamed or linked to its name. link(2) fails
when the name exists: that is the conditional PUT. Every folder on the way is opened without following
symbolic links, so a link planted in the tree leads nowhere. Content types follow from extensions, metadata
is not kept, empty folders stay.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from saggar.storage.base import ObjectInfo
from saggar.storage.errors import (
    Conflict,
    InvalidKey,
    NotFound,
    StorageConfigError,
    StorageError,
    StorageRefused,
    StorageUnavailable,
)
from saggar.storage.files import Data, make_folders, opened_folder, sha256_of, write_new
from saggar.storage.flushers import Flushers
from saggar.storage.group import Item, Publish, place_all
from saggar.storage.keys import check_key

_PIECE = 1 << 20
_TEMPORARY = ".tmp"
_FLUSHERS = 8
_PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.EAGAIN}
_WRONG_PATH = {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}
_TYPES = {
    ".png": "image/png",
    ".webp": "image/webp",
    ".jpg": "image/jpeg",
    ".json": "application/json",
    ".mp4": "video/mp4",
    ".wav": "audio/wav",
    ".flac": "audio/flac",
    ".webm": "video/webm",
    ".tar": "application/x-tar",
    ".parquet": "application/vnd.apache.parquet",
}


class LocalStorage:
    """Objects as files under `root`, which is created when missing."""

    def __init__(self, root: Path) -> None:
        """Raises StorageConfigError when the folder cannot be made."""
        try:
            make_folders(root.absolute() / _TEMPORARY)
        except OSError as error:
            raise StorageConfigError(f"no folder for objects at {root}: {error}") from error
        self._root = root.resolve()
        self._known_folders: set[str] = set()
        self._flushers = Flushers(_FLUSHERS)

    @property
    def url(self) -> str:
        return self._root.as_uri()

    @property
    def conditional_put(self) -> bool:
        return True

    def probe(self) -> bool:
        return True

    def put(
        self,
        key: str,
        data: Data,
        *,
        content_type: str,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        with _translated(key):
            found = self._place(key, data, _replace)
            return _info(key, found, sha256=sha256_of(data), content_type=content_type)

    def put_if_absent(self, key: str, data: Data, *, content_type: str) -> bool:
        with _translated(key):
            try:
                self._place(key, data, _link)
            except FileExistsError:
                return False
            return True

    def put_group(self, items: Sequence[Item]) -> Sequence[StorageError | None]:
        """Every item as by `put`, flushed together; for each None, or what `put` would raise. Raises InvalidKey and
        what befalls all of them alike."""
        errors = self._place_group(items, _replace)
        return [
            None if error is None else translated(item.key, error)
            for item, error in zip(items, errors, strict=True)
        ]

    def put_group_if_absent(self, items: Sequence[Item]) -> Sequence[bool | StorageError]:
        """Every item as by `put_if_absent`, flushed together."""
        answers: list[bool | StorageError] = []
        for item, error in zip(items, self._place_group(items, _link), strict=True):
            if error is None or isinstance(error, FileExistsError):
                answers.append(error is None)
            else:
                answers.append(translated(item.key, error))
        return answers

    def get(self, key: str) -> bytes:
        with _translated(key), self._parent(key) as (folder, name):
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            with os.fdopen(descriptor, "rb") as file:
                return file.read()

    def read(self, key: str, start: int = 0, etag: str | None = None) -> Iterator[bytes]:
        with _translated(key), self._parent(key) as (folder, name):
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            with os.fdopen(descriptor, "rb") as file:
                if etag not in (None, _info(key, os.fstat(descriptor)).etag):
                    raise Conflict(f"{key}: it was replaced meanwhile")
                file.seek(start)
                while piece := file.read(_PIECE):
                    yield piece

    def head(self, key: str) -> ObjectInfo | None:
        try:
            with _translated(key), self._parent(key) as (folder, name):
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except NotFound:
            return None
        return _info(key, found) if stat.S_ISREG(found.st_mode) else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._walk(self._root, "", prefix)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with suppress(NotFound), _translated(key), self._parent(key) as (folder, name):
                os.unlink(name, dir_fd=folder)

    def abandon_uploads(self, before: datetime) -> int:
        removed = 0
        with os.scandir(self._root / _TEMPORARY) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # its writer has just finished
                    if entry.stat(follow_symlinks=False).st_mtime < before.timestamp():
                        os.unlink(entry.path)
                        removed += 1
        return removed

    def uri(self, key: str) -> str:
        return (self._root / check_key(key)).as_uri()

    def presign(self, key: str, expires_s: int = 3600) -> str:
        return self.uri(key)

    def presign_put(self, key: str, *, content_type: str, size: int, expires_s: int = 3600) -> str:
        check_key(key)
        raise StorageConfigError(f"{self.url}: a folder has no URL that a file could be sent to; S3 has")

    def close(self) -> None:
        self._flushers.close()

    def _place(self, key: str, data: Data, publish: Publish) -> os.stat_result:
        """Write under a temporary name, then publish it under the key's."""
        temporary = uuid.uuid4().hex
        with (
            self._parent(key, create=True) as (folder, name),
            opened_folder(self._root / _TEMPORARY) as waiting,
        ):
            try:
                write_new(temporary, data, dir_fd=waiting)
                publish(temporary, waiting, name, folder)
                os.fsync(folder)
                return os.stat(name, dir_fd=folder, follow_symlinks=False)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=waiting)

    def _place_group(self, items: Sequence[Item], publish: Publish) -> Sequence[OSError | None]:
        with _translated(items[0].key if items else ""):
            return place_all(
                self._root, _TEMPORARY, items, publish, self._flushers.flush, self._known_folders
            )

    @contextmanager
    def _parent(self, key: str, create: bool = False) -> Iterator[tuple[int, str]]:
        """The opened folder of a key and the key's last part."""
        *folders, name = check_key(key).split("/")
        with ExitStack() as stack:
            here = stack.enter_context(opened_folder(self._root))
            for part in folders:
                if create:
                    _make_folder(part, here)
                here = stack.enter_context(opened_folder(part, dir_fd=here))
            yield here, name

    def _walk(self, folder: Path, base: str, prefix: str) -> Iterator[ObjectInfo]:
        """Depth first; a folder sorts as its name and a slash, which yields the order of whole keys."""
        try:
            with os.scandir(folder) as entries:
                found = [entry for entry in entries if not entry.name.startswith(".")]
        except FileNotFoundError:
            return
        for key, entry in sorted((base + entry.name + "/" * entry.is_dir(), entry) for entry in found):
            if entry.is_symlink():
                continue
            if entry.is_dir():
                if key.startswith(prefix) or prefix.startswith(key):
                    yield from self._walk(folder / entry.name, key, prefix)
            elif key.startswith(prefix):
                with suppress(FileNotFoundError):  # deleted meanwhile
                    yield _info(key, entry.stat(follow_symlinks=False))


def _replace(temporary: str, waiting: int, name: str, folder: int) -> bool:
    os.replace(temporary, name, src_dir_fd=waiting, dst_dir_fd=folder)
    return True


def _link(temporary: str, waiting: int, name: str, folder: int) -> bool:
    os.link(temporary, name, src_dir_fd=waiting, dst_dir_fd=folder)
    return False


def _make_folder(name: str, parent: int) -> None:
    try:
        os.mkdir(name, dir_fd=parent)
    except FileExistsError:
        return
    os.fsync(parent)


def _info(
    key: str, found: os.stat_result, *, sha256: str | None = None, content_type: str | None = None
) -> ObjectInfo:
    return ObjectInfo(
        key=key,
        size=found.st_size,
        etag=f"{found.st_mtime_ns:x}-{found.st_ino:x}",
        modified=datetime.fromtimestamp(found.st_mtime, UTC),
        sha256=sha256,
        content_type=content_type or _TYPES.get(os.path.splitext(key)[1]),
    )


@contextmanager
def _translated(key: str) -> Iterator[None]:
    """System errors in storage's words. FileExistsError passes: it is an answer, not a failure."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise translated(key, error) from error


def translated(key: str, error: OSError) -> StorageError:
    """A system error in storage's words."""
    if isinstance(error, FileNotFoundError):
        return NotFound(key)
    if error.errno in _WRONG_PATH:
        return InvalidKey(f"{key!r} leads through something that is no folder: {error}")
    if error.errno in _PASSING:
        return StorageUnavailable(f"{key}: {error}")
    return StorageRefused(f"{key}: {error}")
