"""An S3 folder that is pretended: what a listing says, and a read that breaks off, are the test's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from saggar.storage.base import ObjectInfo

KB = 1024


class Bucket:
    """These files by key, whatever a key looks like. `broken`: each read ends in an error after its first KB."""

    def __init__(self, url: str, files: Mapping[str, bytes]) -> None:
        self.url = url
        self.files = files
        self.broken = False

    def _info(self, key: str) -> ObjectInfo:
        data = self.files[key]
        return ObjectInfo(key, len(data), hashlib.md5(data).hexdigest(), datetime.now(UTC))

    def list(self, _: str) -> Iterator[ObjectInfo]:
        return map(self._info, self.files)

    def head(self, key: str) -> ObjectInfo:
        return self._info(key)

    def get(self, key: str) -> bytes:
        return self.files[key]

    def read(self, key: str, start: int, _: str) -> Iterator[bytes]:
        yield self.files[key][start : start + KB]
        if self.broken:
            raise OSError("the line is cut")
        yield self.files[key][start + KB :]

    def close(self) -> None:
        pass
