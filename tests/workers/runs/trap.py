"""A run in a world that is taken away at any call: a real Redis, stores in memory, a worker that is a function.

`Trap` counts every call that a controller makes of Redis and of its stores, and at one of them lets something happen:
the call is not made, its answer is lost, the controller is gone, or somebody else takes the run meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar

import redis
from redis.client import Pipeline
from saggar.storage.base import ObjectInfo
from saggar.storage.errors import NotFound, StorageUnavailable
from saggar.storage.keys import check_key

T = TypeVar("T")
What = Literal["refused", "lost", "killed before", "killed after", "rival", "visitor"]


class Killed(BaseException):
    """The controller's process is gone."""


class Trap:
    """At call number `at` (from 0; None: never) `what` happens, once."""

    def __init__(self) -> None:
        self.calls = 0
        self.dead = False
        self.at: int | None = None
        self.what: What = "refused"
        self.rival: Callable[[], None] = lambda: None
        self.log: list[str] = []

    @classmethod
    def at_call(cls, at: int, what: What) -> Trap:
        trap = cls()
        trap.at, trap.what = at, what
        return trap

    @property
    def sprung(self) -> bool:
        return self.at is not None and self.calls > self.at

    def call(self, name: str, error: type[Exception], call: Callable[[], T]) -> T:
        if self.dead:  # what its stacks still want to do on their way out
            raise Killed
        now, self.calls = self.calls == self.at, self.calls + 1
        if not now:
            return call()
        self.log.append(f"{self.what} at {name}")
        self.dead = self.what.startswith("killed")
        if self.what == "killed before":
            raise Killed
        if self.what == "refused":
            raise error("away")
        if self.what in ("rival", "visitor"):
            self.rival()
            return call()
        answer = call()
        if self.what == "killed after":
            raise Killed
        raise error(f"the answer is lost: {str(answer)[:40]}")


class TrappedRedis(redis.Redis):
    """Its commands, and its pipelines as wholes, go through a trap. `trap` is set once it is made."""

    trap: Trap

    def execute_command(self, *args: object, **options: object) -> object:
        return self.trap.call(
            f"{args[0]} {str(args[3:])[:60]}",
            redis.ConnectionError,
            lambda: redis.Redis.execute_command(self, *args, **options),  # type: ignore[no-untyped-call]
        )

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        pipe = TrappedPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)  # type: ignore[no-untyped-call]
        pipe.trap = self.trap
        return pipe


class TrappedPipeline(Pipeline):
    trap: Trap

    def execute(self, raise_on_error: bool = True) -> list[object]:
        if not self.command_stack:
            return []
        stack = list(self.command_stack)

        def call() -> list[object]:
            return list(Pipeline.execute(self, raise_on_error))  # type: ignore[no-untyped-call]

        return self.trap.call(f"{len(stack)} commands {str(stack[0])[:80]}", redis.ConnectionError, call)


class MemoryStore:
    """A store in memory; `trap` is passed at every call, where there is one."""

    conditional_put = True

    def __init__(self, name: str, objects: dict[str, bytes] | None = None, trap: Trap | None = None) -> None:
        self.url = f"memory://{name}"
        self.objects: dict[str, bytes] = {} if objects is None else objects
        self._trap = trap

    def trapped(self, trap: Trap) -> MemoryStore:
        """The same objects behind a trap."""
        return MemoryStore(self.url.removeprefix("memory://"), self.objects, trap)

    def _call(self, name: str, call: Callable[[], T]) -> T:
        if self._trap is None:
            return call()
        return self._trap.call(f"{name} in {self.url}", StorageUnavailable, call)

    def probe(self) -> bool:
        return True

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        content_type: str,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        content = _bytes(data)
        self._call(f"put {key}", lambda: self.objects.update({check_key(key): content}))
        return _info(key, content)

    def put_if_absent(self, key: str, data: bytes | Path, *, content_type: str) -> bool:
        def put() -> bool:
            if key in self.objects:
                return False
            self.objects[check_key(key)] = _bytes(data)
            return True

        return self._call(f"put_if_absent {key}", put)

    def get(self, key: str) -> bytes:
        def get() -> bytes:
            if key not in self.objects:
                raise NotFound(key)
            return self.objects[key]

        return self._call(f"get {key}", get)

    def read(self, key: str, start: int = 0, etag: str | None = None) -> Iterator[bytes]:
        yield self.get(key)[start:]

    def head(self, key: str) -> ObjectInfo | None:
        return self._call(
            f"head {key}", lambda: _info(key, self.objects[key]) if key in self.objects else None
        )

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found = self._call(f"list {prefix}", lambda: sorted(k for k in self.objects if k.startswith(prefix)))
        return (_info(key, self.objects[key]) for key in found if key in self.objects)

    def delete(self, keys: Iterable[str]) -> None:
        for key in list(keys):
            self._call(f"delete {key}", lambda key=key: self.objects.pop(key, None))

    def abandon_uploads(self, before: datetime) -> int:
        return 0

    def uri(self, key: str) -> str:
        return f"{self.url}/{key}"

    def presign(self, key: str, expires_s: int = 1) -> str:
        raise AssertionError("no run asks for links")

    def presign_put(self, key: str, *, content_type: str, size: int, expires_s: int = 1) -> str:
        raise AssertionError("no run asks for links")

    def close(self) -> None:
        """What is in it stays."""


def _bytes(data: bytes | Path) -> bytes:
    return data if isinstance(data, bytes) else data.read_bytes()


def _info(key: str, data: bytes) -> ObjectInfo:
    digest = hashlib.sha256(data).hexdigest()
    return ObjectInfo(key, len(data), digest, datetime.now(UTC), digest)
