"""The contract of a store, its settings, and the one place that turns a URL into a store.

Two stores keep it: `s3.S3Storage` and `local.LocalStorage`. Both pass the same suite of tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol, Self
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from saggar.storage.errors import InvalidKey, StorageConfigError
from saggar.storage.keys import check_key

_ENV_PREFIX = "SAGGAR_S3_"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object: `size` in bytes, `sha256` and `md5` where they are known without reading, `etag` the store's
    mark of this content.
    """

    key: str
    size: int
    etag: str
    modified: datetime  # aware, UTC
    sha256: str | None = None
    content_type: str | None = None
    md5: str | None = None


class Storage(Protocol):
    """Objects under checked keys. An object appears whole or not at all, and once acknowledged it is durable.

    Every method may raise InvalidKey, StorageUnavailable (try again) and StorageRefused (final).
    """

    @property
    def url(self) -> str:
        """What `open_storage` was given, normalised."""

    @property
    def conditional_put(self) -> bool:
        """Whether `put_if_absent` can be trusted; the first look probes the store."""

    def probe(self) -> bool:
        """Try a conditional PUT on a key that exists; remember and return whether the store refused it."""

    def put(
        self, key: str, data: bytes | Path, *, content_type: str, metadata: Mapping[str, str] = ...
    ) -> ObjectInfo:
        """Write or replace. Metadata is ASCII and may be dropped; the returned sha256 is that of `data`."""

    def put_if_absent(self, key: str, data: bytes | Path, *, content_type: str) -> bool:
        """True: this call made the object. False: it was there, untouched. Atomic among all writers."""

    def get(self, key: str) -> bytes:
        """The whole object, or NotFound."""

    def read(self, key: str, start: int = 0, etag: str | None = None) -> Iterator[bytes]:
        """The object from byte `start` on, in pieces; NotFound. Conflict: it is no longer the one with this etag."""

    def head(self, key: str) -> ObjectInfo | None:
        """What is known without reading, or None when there is no such object."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with this text, whole parts or not; a folder's objects come together."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove these objects; a missing one is no error."""

    def abandon_uploads(self, before: datetime) -> int:
        """Remove what uploads begun before this time left unfinished; how many there were."""

    def uri(self, key: str) -> str:
        """The object's name to the world: s3://bucket/key or file:///path."""

    def presign(self, key: str, expires_s: int = ...) -> str:
        """A URL that reads the object without credentials until it expires; a local file's URL never does."""

    def presign_put(self, key: str, *, content_type: str, size: int, expires_s: int = ...) -> str:
        """A URL that takes one PUT of the object, of this type and so many bytes, without credentials until it
        expires. StorageConfigError: this store has no such URLs.
        """

    def close(self) -> None:
        """Give back connections; the store is unusable afterwards."""


def key_of(storage: Storage, uri: str) -> str:
    """The key of an object that records and results name by this URI. InvalidKey: it is none of this store's."""
    root = f"{storage.url.rstrip('/')}/"
    if not uri.startswith(root):
        raise InvalidKey(f"a URI of another store than {storage.url}")
    return check_key(unquote(uri.removeprefix(root)))


class StorageSettings(BaseModel):
    """How to speak to S3. boto3 finds the credentials by its own chain (environment, file, role)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str | None = None
    """The S3 server's URL; None is AWS."""
    public_endpoint: str | None = None
    """The URL under which readers of presigned links reach the same server; None: the endpoint."""
    region: str | None = None
    path_style: bool = False
    """http://host/bucket/key rather than http://bucket.host/key: what most own servers need."""
    checksums: Literal["when_required", "when_supported"] = "when_required"
    """Newer checksum headers, which many S3 servers refuse; the signature covers the body either way."""
    max_connections: int = Field(default=32, ge=1, le=1024)
    """The connection pool; at least as many as threads that upload."""
    connect_timeout_s: float = Field(default=5.0, gt=0, le=3600, allow_inf_nan=False)
    read_timeout_s: float = Field(default=60.0, gt=0, le=3600, allow_inf_nan=False)
    attempts: int = Field(default=4, ge=1, le=100)
    """Tries of one call, boto3's own retries within each; whoever must outlast an outage loops above this."""
    multipart_bytes: int = Field(default=32 << 20, ge=5 << 20, le=5 << 30)
    """Files from this size on go up in parts."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read SAGGAR_S3_ENDPOINT, SAGGAR_S3_REGION, SAGGAR_S3_PATH_STYLE and so on; empty means unset.

        Raises StorageConfigError naming the variable.
        """
        names = {_ENV_PREFIX + field.upper(): field for field in cls.model_fields}
        unknown = sorted(
            name
            for name, value in env.items()
            if value and name.startswith(_ENV_PREFIX) and name not in names
        )
        if unknown:
            raise StorageConfigError(f"unknown setting {unknown[0]}; there are {', '.join(sorted(names))}")
        try:
            return cls.model_validate({field: env[name] for name, field in names.items() if env.get(name)})
        except ValidationError as error:
            first = error.errors()[0]
            name = _ENV_PREFIX + str(first["loc"][0]).upper()
            raise StorageConfigError(f"{name}={str(first['input'])[:80]!r}: {first['msg']}") from error


def open_storage(url: str, settings: StorageSettings | None = None) -> Storage:
    """s3://bucket/prefix, file:///absolute/folder or a plain path; settings default to the environment.

    Raises StorageConfigError for anything else, and when the store's library is not installed.
    """
    if not url:
        raise StorageConfigError("an empty storage URL; give s3://bucket/prefix or a folder")
    scheme, separator, rest = url.partition("://")
    if separator and "@" in rest.partition("/")[0]:
        raise StorageConfigError(
            f"{scheme}://...: a storage URL holds no user and no password: S3's credentials are boto3's own "
            "(environment, file, role)"
        )
    if not separator or scheme == "file":
        from saggar.storage.local import LocalStorage

        return LocalStorage(_local_folder(url, rest if separator else url))
    if scheme == "s3":
        from saggar.storage.s3 import S3Storage

        bucket, _, prefix = rest.partition("/")
        return S3Storage(bucket, prefix, settings or StorageSettings.from_env())
    raise StorageConfigError(f"{url!r}: a storage URL is s3://bucket/prefix, file:///folder or a path")


def _local_folder(url: str, path: str) -> Path:
    if url.startswith("file://") and not path.startswith("/"):
        raise StorageConfigError(f"{url!r}: a file URL has three slashes and an absolute path")
    return Path(unquote(path)) if url.startswith("file://") else Path(path)
