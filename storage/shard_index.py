"""The index of shards: what each holds, in small objects of their own, and all of them together at the end.

{prefix}/data/00000.tar      a shard; nothing else lies there, for readers that take a whole folder
{prefix}/index/00000.json    what it holds: made of its bytes alone, so that anybody can make it again
{prefix}/index.json          all shards, once the set is finished
{prefix}/_SUCCESS            written last; holds the sha256 of index.json
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import IO, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from saggar.storage.base import Storage
from saggar.storage.errors import Conflict, NotFound
from saggar.storage.keys import check_prefix
from saggar.storage.samples import json_bytes
from saggar.storage.shard_formats import ShardFormat

JSON = "application/json"
VERSION = 1
_HEX64 = r"^[0-9a-f]{64}$"
_INDEX_NAME = re.compile(r"(\d{5,})\.json")
Model = TypeVar("Model", bound=BaseModel)


class ShardKeys:
    """The keys of one set of shards."""

    def __init__(self, prefix: str) -> None:
        """Raises InvalidKey."""
        trimmed = check_prefix(prefix)
        self.base = f"{trimmed}/" if trimmed else ""
        self.data = f"{self.base}data/"
        self.indexes = f"{self.base}index/"
        self.total = f"{self.base}index.json"
        self.success = f"{self.base}_SUCCESS"

    def shard(self, number: int, extension: str) -> str:
        return f"{self.data}{number:05d}.{extension}"

    def index(self, number: int) -> str:
        return f"{self.indexes}{number:05d}.json"


class _Object(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_bytes(self) -> bytes:
        """UTF-8 JSON with sorted keys: equal ones are equal bytes."""
        return json_bytes(self.model_dump(mode="json"))


class ShardIndex(_Object):
    """One shard: its name in `data/`, its `size` in bytes, and the keys of its samples in order."""

    version: int = VERSION
    number: int = Field(ge=0)
    name: str
    format: str
    size: int = Field(ge=0)
    sha256: str = Field(pattern=_HEX64)
    rows: tuple[str, ...]

    @classmethod
    def of(cls, number: int, kind: ShardFormat, source: IO[bytes]) -> Self:
        """The index that a shard's bytes say. Raises ValueError when they are no shard."""
        digest, size = hashlib.sha256(), 0
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            size += len(chunk)
        source.seek(0)
        rows = tuple(sample.key for sample in kind.read(source))
        name = f"{number:05d}.{kind.extension}"
        return cls(
            number=number, name=name, format=kind.name, size=size, sha256=digest.hexdigest(), rows=rows
        )


class ShardLine(_Object):
    """A shard as the total index has it; `rows` is how many."""

    name: str
    size: int = Field(ge=0)
    sha256: str = Field(pattern=_HEX64)
    rows: int = Field(ge=0)


class TotalIndex(_Object):
    """All shards of a set that is finished."""

    version: int = VERSION
    format: str
    rows: int = Field(ge=0)
    size: int = Field(ge=0)
    shards: tuple[ShardLine, ...]

    @classmethod
    def of(cls, format_name: str, shards: Iterable[ShardIndex]) -> Self:
        lines = tuple(
            ShardLine(name=shard.name, size=shard.size, sha256=shard.sha256, rows=len(shard.rows))
            for shard in shards
        )
        rows, size = sum(line.rows for line in lines), sum(line.size for line in lines)
        return cls(format=format_name, rows=rows, size=size, shards=lines)


def read_index(storage: Storage, keys: ShardKeys, number: int) -> ShardIndex:
    """Raises NotFound, and Conflict when it is something else."""
    found = _read(storage, keys.index(number), ShardIndex)
    if found.number != number:
        raise Conflict(f"{keys.index(number)} is the index of shard {found.number}")
    return found


def read_total(storage: Storage, keys: ShardKeys) -> TotalIndex:
    """Raises NotFound before the set is finished, and Conflict when it is something else."""
    return _read(storage, keys.total, TotalIndex)


def success_mark(total: bytes) -> bytes:
    """What `_SUCCESS` holds: the sha256 of the total index, so that an old one is told from a new."""
    return f"{hashlib.sha256(total).hexdigest()}  index.json\n".encode()


def index_numbers(storage: Storage, keys: ShardKeys) -> list[int]:
    """The numbers of the shards that have an index, in order."""
    names = (info.key.removeprefix(keys.indexes) for info in storage.list(keys.indexes))
    return sorted(int(found[1]) for name in names if (found := _INDEX_NAME.fullmatch(name)))


def read_indexes(storage: Storage, prefix: str) -> Iterator[ShardIndex]:
    """The indexes of a set, in order, one small object each; none is no error. Raises Conflict."""
    keys = ShardKeys(prefix)
    for number in index_numbers(storage, keys):
        yield read_index(storage, keys, number)


def _read(storage: Storage, key: str, kind: type[Model]) -> Model:
    try:
        return kind.model_validate_json(storage.get(key))
    except NotFound:
        raise
    except ValidationError as error:
        raise Conflict(f"{key} is no {kind.__name__}: {error.error_count()} errors") from error
