"""S3 and servers that speak it, by boto3. One object is one client: a process needs one, threads share it.

Retries: boto3's "standard" mode inside each call, a loop with full jitter above it. s3_errors.py says which answers are
worth another try.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

from saggar.storage.base import ObjectInfo, StorageSettings
from saggar.storage.errors import (
    Conflict,
    NotFound,
    StorageConfigError,
    StorageDenied,
    StorageRefused,
    StorageUnavailable,
)
from saggar.storage.files import Data, opened_data, sha256_of, size_of
from saggar.storage.keys import check_key, check_prefix
from saggar.storage.retry import Backoff, retrying
from saggar.storage.s3_errors import NO_BUCKET, etag_of, md5_of, no_answer, status_of, translated

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import (
        CreateBucketConfigurationTypeDef,
        GetObjectOutputTypeDef,
        HeadObjectOutputTypeDef,
        ListObjectsV2OutputTypeDef,
    )

Result = TypeVar("Result")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_BUCKET_EXISTS = {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}
_PIECE = 1 << 20
_WRITER = "saggar-writer"
_SHA256 = "sha256"
_READS = 3
_MAX_EXPIRY_S = 7 * 24 * 3600  # what signature v4 allows
_DELETE_AT_ONCE = 1000  # what the API allows


class S3Storage:
    """A bucket, or the part of it under `prefix`. Keys are relative to that prefix."""

    def __init__(self, bucket: str, prefix: str, settings: StorageSettings) -> None:
        """Connects to nothing yet. StorageConfigError without boto3 or with a wrong bucket or endpoint."""
        if not _BUCKET.fullmatch(bucket):
            raise StorageConfigError(
                f"s3://{bucket}: the form is s3://bucket/prefix with a valid bucket name"
            )
        self._bucket = bucket
        trimmed = check_prefix(prefix)
        self._base = f"{trimmed}/" if trimmed else ""
        self._settings = settings
        self._client = _client(settings, settings.endpoint)
        self._signer = (
            _client(settings, settings.public_endpoint) if settings.public_endpoint else self._client
        )
        self._conditional: bool | None = None

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._base}".removesuffix("/")

    @property
    def conditional_put(self) -> bool:
        return self.probe() if self._conditional is None else self._conditional

    def probe(self) -> bool:
        self._require_bucket()  # some servers make one at the first PUT, also of a mistyped name
        key = f"_probe/{uuid.uuid4().hex}"
        self.put(key, b"first", content_type="text/plain")
        try:
            self._conditional = not self._put_once(key, b"second", "text/plain")
        except StorageDenied:
            raise  # nobody has looked at the header
        except StorageRefused:
            self._conditional = False  # a store that does not know the header, and says so
        finally:
            self.delete([key])
        return self._conditional

    def _require_bucket(self) -> None:
        """Raises StorageConfigError when there is none. Whoever may not look learns at the first PUT."""
        try:
            self._call(self._bucket, lambda: self._client.head_bucket(Bucket=self._bucket))
        except NotFound as error:
            raise StorageConfigError(f"s3://{self._bucket}: {NO_BUCKET}") from error
        except StorageRefused as error:
            if error.status != 403:
                raise

    def make_bucket(self) -> None:
        """Create the bucket unless it exists."""
        self._call(self._bucket, self._create_bucket)

    def put(
        self, key: str, data: Data, *, content_type: str, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        sha256 = sha256_of(data)
        tags = _ascii({**(metadata or {}), _SHA256: sha256})
        if isinstance(data, Path) and size_of(data) >= self._settings.multipart_bytes:
            etag = self._put_in_parts(key, data, content_type, tags)
        else:
            etag = self._put_whole(key, data, content_type, tags)
        return ObjectInfo(key, size_of(data), etag, datetime.now(UTC), sha256, content_type)

    def put_if_absent(self, key: str, data: Data, *, content_type: str) -> bool:
        if not self.conditional_put:
            raise StorageRefused(f"{self.url} has no conditional PUT")
        return self._put_once(key, data, content_type)

    def get(self, key: str) -> bytes:
        name = self._name(key)

        def read() -> tuple[bytes, str | None]:
            found = self._client.get_object(Bucket=self._bucket, Key=name)
            etag_of(key, found)
            return found["Body"].read(), found["Metadata"].get(_SHA256)

        # A gateway may cut an answer and its length; what stays wrong, the caller judges.
        for _ in range(_READS):
            data, told = self._call(key, read)
            if told in (None, sha256_of(data)):
                break
        return data

    def read(self, key: str, start: int = 0, etag: str | None = None) -> Iterator[bytes]:
        name = self._name(key)
        only = {"Range": f"bytes={start}-"} if start else {}
        only |= {"IfMatch": f'"{etag}"'} if etag else {}

        def ask() -> GetObjectOutputTypeDef:
            found = self._client.get_object(Bucket=self._bucket, Key=name, **only)  # type: ignore[arg-type]
            etag_of(key, found)
            return found

        try:
            found = self._call(key, ask)
        except StorageRefused as error:
            if error.status != 412:
                raise
            raise Conflict(f"{key}: it was replaced meanwhile") from error
        surplus = 0 if "ContentRange" in found else start  # a server may send the whole of it all the same
        with translated(key), closing(found["Body"]) as body:
            for piece in body.iter_chunks(_PIECE):
                if surplus < len(piece):
                    yield piece[surplus:]
                surplus = max(0, surplus - len(piece))

    def head(self, key: str) -> ObjectInfo | None:
        name = self._name(key)

        def look() -> HeadObjectOutputTypeDef:
            found = self._client.head_object(Bucket=self._bucket, Key=name)
            if "ETag" not in found or "LastModified" not in found:
                raise no_answer(key)
            return found

        try:
            found = self._call(key, look)
        except NotFound:
            return None
        return ObjectInfo(
            key=key,
            size=found["ContentLength"],
            etag=etag_of(key, found),
            modified=found["LastModified"],
            sha256=found["Metadata"].get(_SHA256),
            content_type=found["ContentType"],
            md5=md5_of(found),
        )

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        base = self._base
        token: dict[str, str] = {}
        what = f"{self.url}/{prefix}" if prefix else self.url

        def ask() -> ListObjectsV2OutputTypeDef:
            page = self._client.list_objects_v2(Bucket=self._bucket, Prefix=base + prefix, **token)  # type: ignore[arg-type]
            if "IsTruncated" not in page:
                raise no_answer(what)
            return page

        while True:
            page = self._call(what, ask)
            for item in page.get("Contents", []):
                key = item["Key"].removeprefix(base)
                yield ObjectInfo(key, item["Size"], item["ETag"].strip('"'), item["LastModified"])
            if not page["IsTruncated"]:
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, keys: Iterable[str]) -> None:
        names = (self._name(key) for key in keys)
        while chunk := list(islice(names, _DELETE_AT_ONCE)):
            self._delete(chunk)

    def abandon_uploads(self, before: datetime) -> int:
        ended = 0
        for name, upload in list(self._uploads_before(before)):
            with suppress(NotFound):  # it was completed or aborted meanwhile
                self._abort(name, upload)
                ended += 1
        return ended

    def uri(self, key: str) -> str:
        return f"s3://{self._bucket}/{self._name(key)}"

    def presign(self, key: str, expires_s: int = 3600) -> str:
        return self._presign("get_object", key, {}, expires_s)

    def presign_put(self, key: str, *, content_type: str, size: int, expires_s: int = 3600) -> str:
        # Both are signed as headers: another type or length is another signature.
        return self._presign(
            "put_object", key, {"ContentType": content_type, "ContentLength": size}, expires_s
        )

    def close(self) -> None:
        self._client.close()
        self._signer.close()

    def _presign(self, method: str, key: str, more: Mapping[str, object], expires_s: int) -> str:
        if not 1 <= expires_s <= _MAX_EXPIRY_S:
            raise StorageConfigError(f"a presigned URL lives 1 to {_MAX_EXPIRY_S} seconds, not {expires_s}")
        what = {"Bucket": self._bucket, "Key": self._name(key), **more}
        with translated(key):
            return self._signer.generate_presigned_url(method, Params=what, ExpiresIn=expires_s)

    def _name(self, key: str) -> str:
        """The object's key in the bucket."""
        return self._base + check_key(key)

    def _create_bucket(self) -> None:
        from botocore.exceptions import ClientError

        region = self._client.meta.region_name
        try:
            if self._settings.endpoint or region == "us-east-1":  # the one region that AWS wants unnamed
                self._client.create_bucket(Bucket=self._bucket)
            else:
                where: CreateBucketConfigurationTypeDef = {"LocationConstraint": cast("Any", region)}
                self._client.create_bucket(Bucket=self._bucket, CreateBucketConfiguration=where)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") not in _BUCKET_EXISTS:
                raise

    def _put_whole(self, key: str, data: Data, content_type: str, tags: Mapping[str, str]) -> str:
        name = self._name(key)

        def put() -> str:
            with opened_data(data) as body:
                answer = self._client.put_object(
                    Bucket=self._bucket, Key=name, Body=body, ContentType=content_type, Metadata=tags
                )
            return etag_of(key, answer)

        return self._call(key, put, writes=True)

    def _put_in_parts(self, key: str, path: Path, content_type: str, tags: Mapping[str, str]) -> str:
        from boto3.s3.transfer import TransferConfig

        name = self._name(key)
        parts = TransferConfig(multipart_threshold=self._settings.multipart_bytes, max_concurrency=4)
        extra = {"ContentType": content_type, "Metadata": dict(tags)}

        def send() -> None:
            try:
                self._client.upload_file(str(path), self._bucket, name, ExtraArgs=extra, Config=parts)
            except KeyError as error:  # the transfer manager takes names out of answers as they are
                raise no_answer(key) from error

        self._call(key, send, writes=True)
        found = self.head(key)
        if found is None or found.size != size_of(path):
            raise StorageUnavailable(f"{key}: acknowledged, yet not there in full")
        return found.etag

    def _put_once(self, key: str, data: Data, content_type: str) -> bool:
        """A PUT that creates, with a mark of this very call. In one piece, files too: S3 takes 5 GiB so.

        When a retry, boto3's or ours, meets the object of an earlier try whose answer was lost, the mark tells.
        """
        from botocore.exceptions import ClientError

        name, mark = self._name(key), uuid.uuid4().hex
        tags = {_WRITER: mark} | ({} if isinstance(data, Path) else {_SHA256: sha256_of(data)})

        def put() -> bool:
            try:
                with opened_data(data) as body:
                    answer = self._client.put_object(
                        Bucket=self._bucket,
                        Key=name,
                        Body=body,
                        ContentType=content_type,
                        Metadata=tags,
                        IfNoneMatch="*",
                    )
            except ClientError as error:
                if status_of(error) != 412:
                    raise
                there = self._client.head_object(Bucket=self._bucket, Key=name)
                return there["Metadata"].get(_WRITER) == mark
            etag_of(key, answer)
            return True

        return self._call(key, put, writes=True)

    def _delete(self, names: Iterable[str]) -> None:
        what = [{"Key": name} for name in names]
        answer = self._call(
            what[0]["Key"],
            lambda: self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": what, "Quiet": True}),  # type: ignore[typeddict-item]
        )
        for failed in answer.get("Errors", []):
            if failed.get("Code") != "NoSuchKey":
                raise StorageUnavailable(f"{failed.get('Key')} was not deleted: {failed.get('Message')}")

    def _uploads_before(self, before: datetime) -> Iterator[tuple[str, str]]:
        marks: dict[str, str] = {}
        while True:
            page = self._call(
                "multipart uploads",
                lambda more=marks: self._client.list_multipart_uploads(  # type: ignore[misc]
                    Bucket=self._bucket, Prefix=self._base, **more
                ),
            )
            for upload in page.get("Uploads", []):
                if upload["Initiated"] < before:
                    yield upload["Key"], upload["UploadId"]
            if not page["IsTruncated"]:
                return
            marks = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _abort(self, name: str, upload: str) -> None:
        self._call(
            name,
            lambda: self._client.abort_multipart_upload(Bucket=self._bucket, Key=name, UploadId=upload),
        )

    def _call(self, what: str, call: Callable[[], Result], *, writes: bool = False) -> Result:
        """A write that finds nothing is tried again: somebody removed an upload's parts, or what was in the way."""

        def once() -> Result:
            try:
                with translated(what):
                    return call()
            except NotFound as error:
                if not writes:
                    raise
                raise StorageUnavailable(f"{what}: it was not found while it was written") from error

        return retrying(once, lambda failures: failures < self._settings.attempts, backoff=Backoff())


def _client(settings: StorageSettings, endpoint: str | None) -> S3Client:
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise StorageConfigError("s3:// needs boto3: install saggar[s3]") from error
    session = boto3.Session()  # the module's default session is not safe among threads
    config = Config(
        signature_version="s3v4",
        s3={"addressing_style": "path" if settings.path_style else "auto"},
        max_pool_connections=settings.max_connections,
        connect_timeout=settings.connect_timeout_s,
        read_timeout=settings.read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": 3},
        request_checksum_calculation=settings.checksums,
        response_checksum_validation=settings.checksums,
    )
    region = settings.region or session.region_name or "us-east-1"
    if endpoint and "@" in urlsplit(endpoint).netloc:
        raise StorageConfigError(
            "an endpoint of S3 holds no user and no password: credentials are boto3's own"
        )
    try:
        return session.client("s3", region_name=region, endpoint_url=endpoint, config=config)
    except ValueError as error:
        raise StorageConfigError(f"{endpoint}: {error}") from error


def _ascii(metadata: Mapping[str, str]) -> dict[str, str]:
    for name, value in metadata.items():
        if not (name + value).isascii() or not (name + value).isprintable():
            raise StorageRefused(f"metadata of objects is printable ASCII, and {name}={value!r} is not")
    return dict(metadata)
