"""Small samples for tests of shards, and a store that does something at its n-th call."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from PIL import Image
from saggar.storage.base import ObjectInfo, Storage
from saggar.storage.samples import Sample


def png(number: int, size: tuple[int, int] = (12, 8)) -> bytes:
    """A picture of one colour, another for each number below 65536."""
    target = io.BytesIO()
    Image.new("RGB", size, (number % 256, number // 256, 7)).save(target, "PNG")
    return target.getvalue()


def sample(number: int) -> Sample:
    """Row `number`, with a caption that no log or file may choke on."""
    return Sample(
        f"row-{number:04d}",
        {"png": png(number)},
        f"jar {number} <b> \u2028 ü",
        {
            "seed": number,
            "width": 12,
            "height": 8,
            "model": "noop",
            "numerics": "exact",
            "parameters": {"steps": 4},
        },
    )


def samples(count: int) -> list[Sample]:
    return [sample(number) for number in range(count)]


class HookedStorage:
    """A store that calls `before` and `after` with the number of each call (from 0) and the method's name."""

    def __init__(
        self,
        storage: Storage,
        before: Callable[[int, str], None] = lambda number, name: None,
        after: Callable[[int, str], None] = lambda number, name: None,
    ) -> None:
        self._storage = storage
        self._before, self._after = before, after
        self.calls = 0

    @property
    def url(self) -> str:
        return self._storage.url

    @property
    def conditional_put(self) -> bool:
        return self._storage.conditional_put

    def probe(self) -> bool:
        return self._storage.probe()

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        content_type: str,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        return self._do(
            "put", lambda: self._storage.put(key, data, content_type=content_type, metadata=metadata or {})
        )

    def put_if_absent(self, key: str, data: bytes | Path, *, content_type: str) -> bool:
        return self._do(
            "put_if_absent", lambda: self._storage.put_if_absent(key, data, content_type=content_type)
        )

    def get(self, key: str) -> bytes:
        return self._do("get", lambda: self._storage.get(key))

    def head(self, key: str) -> ObjectInfo | None:
        return self._do("head", lambda: self._storage.head(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(self._do("list", lambda: list(self._storage.list(prefix))))

    def delete(self, keys: Iterable[str]) -> None:
        self._do("delete", lambda: self._storage.delete(keys))

    def abandon_uploads(self, before) -> int:
        return self._storage.abandon_uploads(before)

    def uri(self, key: str) -> str:
        return self._storage.uri(key)

    def presign(self, key: str, expires_s: int = 3600) -> str:
        return self._storage.presign(key, expires_s)

    def presign_put(self, key: str, *, content_type: str, size: int, expires_s: int = 3600) -> str:
        return self._storage.presign_put(key, content_type=content_type, size=size, expires_s=expires_s)

    def close(self) -> None:
        self._storage.close()

    def _do(self, name, call):
        number = self.calls
        self.calls += 1
        self._before(number, name)
        result = call()
        self._after(number, name)
        return result
