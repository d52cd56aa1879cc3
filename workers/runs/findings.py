"""What a check of stored objects can say."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from saggar.storage.base import Storage
from saggar.storage.errors import NotFound
from saggar.storage.results import ManifestOutput

Kind = Literal["missing", "wrong", "extra"]


@dataclass(frozen=True, order=True)
class Finding:
    """Something that is not as it should be: the object's key, and why in one line."""

    key: str
    kind: Kind
    why: str


@dataclass(frozen=True, order=True)
class Pick:
    """A sample to make again: an output of the result in folder `base`, or a row of the shard under key `base`,
    whose format is `format`."""

    rank: str
    base: str
    output: ManifestOutput | None = field(default=None, compare=False)
    row: str | None = field(default=None, compare=False)
    format: str = field(default="", compare=False)


@dataclass
class Part:
    """What one job's folder, one run's own, or one set of shards, came to."""

    results: int = 0
    runs: int = 0
    shards: int = 0
    rows: int = 0
    objects: int = 0
    bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    picks: list[Pick] = field(default_factory=list)


def read(storage: Storage, key: str) -> bytes | None:
    """The object, or None when there is none."""
    try:
        return storage.get(key)
    except NotFound:
        return None


def check_bytes(key: str, size: int, sha256: str, data: bytes | None) -> Iterator[Finding]:
    """One object, or its absence, against its size and hash."""
    if data is None:
        yield Finding(key, "missing", f"{size} bytes are named and not there")
    elif len(data) != size:
        yield Finding(key, "wrong", f"{len(data)} bytes, not {size}")
    elif hashlib.sha256(data).hexdigest() != sha256:
        yield Finding(key, "wrong", "other bytes than its sha256 says")


def rank(name: str) -> str:
    """A sample's place in the order in which samples are picked: by chance, and always the same."""
    return hashlib.sha256(name.encode()).hexdigest()
