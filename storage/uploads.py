"""Input files of jobs on their way into the store: put by us, or by whoever holds a presigned URL.

    {store}/uploads/{sha256}.{ext}     a file that was at hand: the same content is there once
    {store}/uploads/{random}.{ext}     one that a client sends to a presigned URL

A worker may read its own store's uploads without being told. Nothing here removes them: a lifecycle rule of the bucket
for `uploads/` does.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from saggar.storage.base import Storage
from saggar.storage.errors import Conflict, StorageConfigError
from saggar.storage.files import sha256_of

UPLOADS = "uploads"
MAX_UPLOAD_BYTES = 5 << 30  # what S3 takes in one PUT
CONTENT_TYPES: Mapping[str, str] = {
    "png": "image/png",
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "webp": "image/webp",
    "avif": "image/avif",
    "gif": "image/gif",
    "bmp": "image/bmp",
    "tif": "image/tiff",
    "tiff": "image/tiff",
    "mp4": "video/mp4",
    "mov": "video/quicktime",
    "webm": "video/webm",
    "mkv": "video/x-matroska",
    "wav": "audio/wav",
    "flac": "audio/flac",
    "ogg": "audio/ogg",
    "mp3": "audio/mpeg",
    "m4a": "audio/mp4",
}
"""Of the extensions that uploads have. A worker asks the content alone; browsers and dashboards ask these."""

_EXTENSION = re.compile(r"[a-z0-9]{1,10}")


@dataclass(frozen=True)
class UploadGrant:
    """Leave to send one file: a PUT to `url` with exactly these headers. `uri` goes into the job."""

    url: str
    uri: str
    headers: Mapping[str, str] = field(default_factory=dict)


def upload_key(path: Path) -> str:
    """The key of a local file, by its content. Raises OSError."""
    extension = path.suffix[1:].lower()
    name = sha256_of(path)
    return f"{UPLOADS}/{name}.{extension}" if _EXTENSION.fullmatch(extension) else f"{UPLOADS}/{name}"


def put_upload(storage: Storage, path: Path) -> str:
    """Puts a local file where jobs of this store may name it, unless it is there; its URI.

    Raises OSError, StorageError; Conflict: the file changed while it was sent.
    """
    key = upload_key(path)
    if storage.head(key) is None:
        content_type = CONTENT_TYPES.get(path.suffix[1:].lower(), "application/octet-stream")
        sent = storage.put(key, path, content_type=content_type)
        if sent.sha256 is not None and sent.sha256 not in key:
            storage.delete([key])
            raise Conflict(f"{path} changed while it was sent: send it again")
    return storage.uri(key)


def grant_upload(storage: Storage, extension: str, size: int, expires_s: int = 900) -> UploadGrant:
    """For a web backend whose client sends a file of `size` bytes by itself: a URL that takes that one PUT.

    Raises StorageConfigError for an extension that is not in CONTENT_TYPES, a size that is none, and a store that
    has no URLs.
    """
    content_type = CONTENT_TYPES.get(extension)
    if content_type is None:
        raise StorageConfigError(
            f"{extension!r} is no upload's extension; there are {', '.join(CONTENT_TYPES)}"
        )
    if not 1 <= size <= MAX_UPLOAD_BYTES:
        raise StorageConfigError(f"an upload has 1 to {MAX_UPLOAD_BYTES} bytes, not {size}")
    key = f"{UPLOADS}/{uuid.uuid4().hex}.{extension}"
    url = storage.presign_put(key, content_type=content_type, size=size, expires_s=expires_s)
    headers = {"Content-Type": content_type, "Content-Length": str(size)}
    return UploadGrant(url, storage.uri(key), headers)
