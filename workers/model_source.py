"""A model in an S3 folder, `s3://bucket/prefix`, fetched to this machine: the engine takes local folders only.

    {cache}/{bucket}--{prefix}/blobs/{etag}-{size}       each content once
    {cache}/{bucket}--{prefix}/{digest}/...              a folder of links for each state that the S3 folder had

A folder appears once it is whole, so whoever loads from it is not disturbed by a newer one. Workers of one
machine share the cache; a lock lets one of them fetch. model_cache.py keeps it within its limit.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from saggar.engine.models.source.files import INDEX, json_object, needed
from saggar.engine.models.source.outline import write_outline
from saggar.jobs.errors import ConfigError
from saggar.storage.base import ObjectInfo, Storage, open_storage
from saggar.storage.download import download
from saggar.storage.errors import Conflict
from saggar.storage.keys import check_key
from saggar.workers.model_cache import make_room, using

log = logging.getLogger(__name__)
Tell = Callable[[str], None]

AT_ONCE = 4
_TOLD_EVERY = 0.1  # of all bytes


class OtherFileFailed(Exception):
    """Another file failed: this one need not arrive."""


def is_remote(model: str) -> bool:
    """Whether the model has to be fetched by `local_model` first."""
    return model.startswith("s3://")


@contextmanager
def local_model(model: str, cache: Path, tell: Tell = log.info, limit: int | None = None) -> Iterator[str]:
    """What the engine is given: the local folder of an S3 folder, fetched if need be; anything else as it is. Until the
    end it is not removed from the cache, which may hold `limit` bytes.

    `tell` gets the lines of progress. ConfigError: no model there, or no room here; LoadError: its index is damaged;
    StorageUnavailable, after which the next call goes on; StorageRefused; Conflict: it changes all the time.
    """
    if not is_remote(model):
        yield model
        return
    with ExitStack() as used:
        storage = open_storage(model)
        try:
            folder = _fetch(storage, cache, tell, limit, used)
        finally:
            storage.close()
        yield str(folder)


@contextmanager
def model_for_people(model: str) -> Iterator[str]:
    """`local_model` for a command: the cache is the environment's, and progress goes to standard error."""
    import click
    from saggar.workers.settings import cache_settings

    cache, limit = cache_settings()
    with local_model(model, cache, lambda line: click.echo(line, err=True), limit) as folder:
        yield folder


@contextmanager
def outlined(model: str) -> Iterator[Path]:
    """An S3 folder as an outline (engine/models/source/outline.py), gone at the end: no weights are fetched.

    Raises as `local_model`.
    """
    storage = open_storage(model)
    try:
        with TemporaryDirectory(prefix="saggar-outline-") as folder:
            wanted = _wanted(storage)

            def read(name: str, first: int, end: int) -> bytes:
                return _part(storage, wanted[name], first, end)

            write_outline(Path(folder), {name: info.size for name, info in wanted.items()}, read)
            yield Path(folder)
    finally:
        storage.close()


def _part(storage: Storage, info: ObjectInfo, first: int, end: int) -> bytes:
    """Of an object, as it was listed."""
    found = bytearray()
    for piece in storage.read(info.key, first, info.etag):
        found += piece
        if len(found) >= end - first:
            break
    return bytes(found[: end - first])


def _fetch(storage: Storage, cache: Path, tell: Tell, limit: int | None, used: ExitStack) -> Path:
    """`used` holds the state in the cache from now on."""
    place = cache.absolute() / storage.url.removeprefix("s3://").replace("/", "--")
    (place / "blobs").mkdir(parents=True, exist_ok=True)
    with _locked(place / "lock", tell):
        try:
            return _fetch_state(storage, place, tell, limit, used)
        except Conflict as error:
            tell(f"{storage.url} changed while it was fetched, once more: {error}")
            used.close()
            return _fetch_state(storage, place, tell, limit, used)


def _fetch_state(storage: Storage, place: Path, tell: Tell, limit: int | None, used: ExitStack) -> Path:
    wanted = _wanted(storage)
    folder = place / _digest(wanted)
    used.enter_context(using(place, folder.name))
    blobs = {_blob(place, info): info for info in wanted.values()}  # two names of one content are one blob
    if limit is not None:
        make_room(place.parent, limit, place, {blob: info.size for blob, info in blobs.items()}, tell)
    missing = {blob: info for blob, info in blobs.items() if not _is_whole(blob, info)}
    if missing:
        _Download(storage, missing, tell).run(place)
    if not all(_is_whole(folder / name, info) for name, info in wanted.items()):
        _link(wanted, place, folder)
    return folder


def _wanted(storage: Storage) -> dict[str, ObjectInfo]:
    """What of the S3 folder a pipeline is loaded from, by name."""
    found = {info.key: info for info in storage.list("")}
    if INDEX not in found:
        raise ConfigError(
            f"{storage.url}: there is no {INDEX}: it must be the folder of a diffusers pipeline"
        )
    index = json_object(storage.get(INDEX), f"{storage.url}/{INDEX}")
    # The names become paths, also of what need not be fetched because its content is here.
    return {check_key(name): found[name] for name in needed(index, found)}


class _Download:
    """Several objects at once; the first failure ends all."""

    def __init__(self, storage: Storage, missing: Mapping[Path, ObjectInfo], tell: Tell) -> None:
        self._storage = storage
        self._missing = missing
        self._tell = tell
        self._total = sum(info.size for info in missing.values())
        self._done = self._told = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def run(self, place: Path) -> None:
        room = shutil.disk_usage(place).free
        there = sum(part.stat().st_size for part in (place / "blobs").glob("*.part"))
        if self._total - there > room:
            raise ConfigError(f"{place}: {_gb(self._total)} are to be fetched and {_gb(room)} are free")
        what = f"{len(self._missing)} files, {_gb(self._total)}"
        self._tell(f"fetching {self._storage.url}: {what}, to {place}")
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="saggar-fetch") as pool:
            futures = [pool.submit(self._one, blob, info) for blob, info in self._missing.items()]
        errors = [error for future in futures if (error := future.exception())]
        if errors:
            raise next((error for error in errors if not isinstance(error, OtherFileFailed)), errors[0])
        self._tell(f"fetched {self._storage.url}")

    def _one(self, blob: Path, info: ObjectInfo) -> None:
        try:
            download(self._storage, info, blob, self._count)
        except BaseException:
            self._stopped.set()
            raise

    def _count(self, size: int) -> None:
        if self._stopped.is_set():
            raise OtherFileFailed
        with self._lock:
            self._done += size
            if self._done - self._told < _TOLD_EVERY * self._total:
                return
            self._told = self._done
            share = 100 * self._done // self._total
        self._tell(f"fetched {share}%: {_gb(self._done)} of {_gb(self._total)}")


def _link(wanted: Mapping[str, ObjectInfo], place: Path, folder: Path) -> None:
    """A folder of links to the blobs, put in place at once; one that is damaged makes way for it."""
    new = place / f".{uuid.uuid4().hex}"
    for name, info in wanted.items():
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        (new / name).symlink_to(os.path.relpath(_blob(place, info), (new / name).parent))
    if folder.exists():
        shutil.rmtree(folder)
    new.rename(folder)


def _blob(place: Path, info: ObjectInfo) -> Path:
    return place / "blobs" / f"{info.etag}-{info.size}"


def _is_whole(path: Path, info: ObjectInfo) -> bool:
    return path.is_file() and path.stat().st_size == info.size


def _digest(wanted: Mapping[str, ObjectInfo]) -> str:
    state = sorted((name, info.etag, info.size) for name, info in wanted.items())
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]


@contextmanager
def _locked(path: Path, tell: Tell) -> Iterator[None]:
    """One process at a time; the others wait."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"another process fetches to {path.parent}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
