"""A set of shards against its indexes."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence

from saggar.storage.base import ObjectInfo, Storage
from saggar.storage.errors import Conflict, NotFound
from saggar.storage.shard_formats import shard_format
from saggar.storage.shard_index import (
    ShardIndex,
    ShardKeys,
    TotalIndex,
    read_index,
    read_total,
    success_mark,
)
from saggar.workers.runs.findings import Finding, Part, Pick, check_bytes, rank, read

_MEMBER = re.compile(r"(?P<base>(?:.*/)?)(?:index/\d{5,}\.json|data/\d{5,}\.(?:tar|parquet))")
_NUMBERED = re.compile(r"(\d{5,})\.(?:json|tar|parquet)")


def set_of(key: str) -> str | None:
    """The prefix of the set to whose shards or indexes a key belongs ("" is the root), or None."""
    found = _MEMBER.fullmatch(key)
    return found["base"].removesuffix("/") if found else None


def check_set(storage: Storage, base: str, found: Sequence[ObjectInfo]) -> Iterator[Part]:
    """One part for each shard, then one for the whole; `found` are the set's shards and indexes."""
    keys = ShardKeys(base)
    there = {info.key: info for info in found}
    numbers = {int(match[1]) for key in there if (match := _NUMBERED.search(key.rpartition("/")[2]))}
    indexes: list[ShardIndex] = []
    rows: dict[str, str] = {}
    named: set[str] = set()
    for number in range(max(numbers) + 1):
        part = Part()
        named.add(keys.index(number))
        index = _index(storage, keys, number, part)
        if index is not None:
            indexes.append(index)
            key = keys.data + index.name
            named.add(key)
            _check_shard(storage, key, index, there.get(key), part)
            for row in index.rows:
                if (first := rows.setdefault(row, index.name)) != index.name:
                    part.findings.append(Finding(key, "wrong", f"row {row} is in {first} too"))
        yield part
    yield _check_whole(storage, keys, indexes, [key for key in there if key not in named])


def _index(storage: Storage, keys: ShardKeys, number: int, part: Part) -> ShardIndex | None:
    key = keys.index(number)
    part.objects += 1
    try:
        return read_index(storage, keys, number)
    except NotFound:
        part.findings.append(Finding(key, "missing", "a shard's index; numbers have no gaps"))
    except Conflict as error:
        part.findings.append(Finding(key, "wrong", str(error)))
    return None


def _check_shard(storage: Storage, key: str, index: ShardIndex, info: ObjectInfo | None, part: Part) -> None:
    part.shards, part.objects = 1, part.objects + 1
    part.bytes += info.size if info else 0
    part.rows = len(index.rows)
    data = read(storage, key) if info else None
    part.findings += check_bytes(key, index.size, index.sha256, data)
    if part.findings or data is None:
        return
    try:
        again = ShardIndex.of(index.number, shard_format(index.format), io.BytesIO(data))
    except ValueError as error:
        part.findings.append(Finding(key, "wrong", f"cannot be read as {index.format}: {error}"))
        return
    if again != index:
        part.findings.append(Finding(key, "wrong", "holds other rows than its index says"))
        return
    part.picks += [Pick(rank(row), key, row=row, format=index.format) for row in index.rows]


def _check_whole(
    storage: Storage, keys: ShardKeys, indexes: Sequence[ShardIndex], unnamed: Sequence[str]
) -> Part:
    """The total index, `_SUCCESS`, and what no index names."""
    part = Part(objects=2 + len(unnamed))
    part.findings += [Finding(key, "extra", "no index names it") for key in unnamed]
    try:
        total = read_total(storage, keys)
    except NotFound:
        part.findings.append(Finding(keys.total, "missing", "the set is not finished"))
        return part
    except Conflict as error:
        part.findings.append(Finding(keys.total, "wrong", str(error)))
        return part
    if total != TotalIndex.of(total.format, indexes):
        part.findings.append(Finding(keys.total, "wrong", "says other than the shards' indexes"))
    try:
        if storage.get(keys.success) != success_mark(storage.get(keys.total)):
            part.findings.append(Finding(keys.success, "wrong", "is of another index.json"))
    except NotFound:
        part.findings.append(Finding(keys.success, "missing", "the set is not finished"))
    return part


def closing_keys(bases: Iterable[str]) -> set[str]:
    """The total index and `_SUCCESS` of these sets."""
    keys = map(ShardKeys, bases)
    return {key for one in keys for key in (one.total, one.success)}
