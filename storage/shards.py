"""Shards written exactly once: whole or not at all, numbered without gaps, no row twice, whoever is killed when.

    with ShardWriter(storage, "cats/shards", "webdataset") as writer:
        for sample in samples:        # a new writer after a crash is given all of them again
            writer.add(sample)        # what is packed already is passed over
        writer.finish()

How it holds. A shard is one object, created under its final number by one conditional PUT: it is there in full or
not at all, and of two packers one gets the number. Whoever is refused reads what the other packed, drops those rows
from its own shard and goes on to the next number; so a packer creates shard n only when it knows the rows of 0 to
n - 1. A shard's index is made of the shard's bytes alone: if its packer is killed between the two, the next one makes
the same index of the shard it finds. Nothing is ever replaced or has to be cleaned up.

A store without conditional PUT has no judge of its own. There the caller must be the only packer (`sole_writer`), by
a lease for instance; a packer that wakes up after its lease could still replace a shard, which `saggar verify` tells.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from saggar.storage.base import Storage
from saggar.storage.errors import Conflict, NotFound, StorageConfigError
from saggar.storage.files import Data
from saggar.storage.samples import Sample, SampleSpool
from saggar.storage.shard_formats import shard_format
from saggar.storage.shard_index import (
    JSON,
    ShardIndex,
    ShardKeys,
    TotalIndex,
    index_numbers,
    read_index,
    success_mark,
)

DEFAULT_TARGET_BYTES = 256 << 20
MAX_TARGET_BYTES = 4 << 30  # a conditional PUT is one request, of which S3 takes 5 GiB


class ShardWriter:
    """Packs samples into shards under a prefix that holds nothing else. One thread uses it.

    A shard is closed by the sample with which it reaches `target_bytes` (of samples) or `target_count`: the same
    samples in the same order make the same shards. Memory holds the keys of all rows and a few megabytes of samples;
    the open shard waits in `folder` (default: the system's for temporary files), once as samples and once as the file
    that goes up. After SIGKILL the latter may stay there.
    """

    def __init__(
        self,
        storage: Storage,
        prefix: str,
        format_name: str = "webdataset",
        *,
        target_bytes: int = DEFAULT_TARGET_BYTES,
        target_count: int | None = None,
        folder: Path | None = None,
        sole_writer: bool = False,
    ) -> None:
        """Reads all indexes, so that it knows what is packed.

        Raises StorageConfigError for wrong targets, an unknown format or a store without conditional PUT, Conflict
        when the shards there are of another format or damaged.
        """
        if not 1 <= target_bytes <= MAX_TARGET_BYTES or (target_count is not None and target_count < 1):
            raise StorageConfigError(f"a shard's target is 1 to {MAX_TARGET_BYTES} bytes, at least 1 sample")
        if not sole_writer and not storage.conditional_put:
            raise StorageConfigError(
                f"{storage.url} has no conditional PUT: only a sole writer can pack there"
            )
        self._storage = storage
        self._keys = ShardKeys(prefix)
        self._format = shard_format(format_name)
        self._target_bytes, self._target_count = target_bytes, target_count
        self._folder = folder
        self._packed: set[str] = set()
        self._shards: list[ShardIndex] = []
        self._pending = SampleSpool(folder)
        self._load()

    @property
    def packed(self) -> AbstractSet[str]:
        """The keys of all rows that stand in shards, whoever packed them, as far as this writer knows."""
        return self._packed

    @property
    def shards(self) -> tuple[ShardIndex, ...]:
        """The shards it knows of, in order."""
        return tuple(self._shards)

    def add(self, sample: Sample) -> bool:
        """Takes a sample in; False: it is packed or waiting already. May write a shard.

        Raises ValueError for a sample that cannot be packed. After StorageUnavailable nothing is lost: add it again.
        """
        if sample.key in self._packed or sample.key in self._pending:
            return False
        sample.check()
        self._format.check(sample)
        if self._full():  # the store was away when it became so
            self.flush()
        self._pending.append(sample)
        if self._full():
            self.flush()
        return True

    def flush(self) -> None:
        """Writes what waits as a shard, however small. After StorageUnavailable it can be called again."""
        while len(self._pending):
            number = len(self._shards)
            key = self._keys.shard(number, self._format.extension)
            if self._storage.head(key) is None:
                withdrawn = self._withdraw_success()
                with self._encoded() as path:
                    if self._create(key, path):
                        with path.open("rb") as file:
                            self._commit(ShardIndex.of(number, self._format, file))
                        continue
                if withdrawn:  # by somebody who slept here while another one finished the set
                    self._restore_success()
            self._adopt(number)

    def finish(self) -> TotalIndex:
        """Writes what waits, the total index and, last, `_SUCCESS`. Adding and finishing again is allowed."""
        self.flush()
        self._catch_up()
        total = TotalIndex.of(self._format.name, self._shards)
        data = total.to_bytes()
        self._storage.put(self._keys.total, data, content_type=JSON)
        self._storage.put(self._keys.success, success_mark(data), content_type="text/plain")
        return total

    def close(self) -> None:
        """What waits is dropped: only shards count."""
        self._pending.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _full(self) -> bool:
        if self._target_count is not None and len(self._pending) >= self._target_count:
            return True
        return self._pending.bytes >= self._target_bytes

    def _load(self) -> None:
        """All indexes, and the shards whose packer was killed before it had written theirs."""
        numbers = index_numbers(self._storage, self._keys)
        for number in range(numbers[-1] + 1 if numbers else 0):
            self._adopt(number)
        self._catch_up()

    def _catch_up(self) -> None:
        while self._storage.head(self._keys.shard(len(self._shards), self._format.extension)) is not None:
            self._adopt(len(self._shards))

    def _adopt(self, number: int) -> None:
        """Takes note of a shard that is there."""
        try:
            index = read_index(self._storage, self._keys, number)
        except NotFound:
            self._commit(self._read_shard(number))
        else:
            self._note(index)

    def _read_shard(self, number: int) -> ShardIndex:
        key = self._keys.shard(number, self._format.extension)
        try:
            data = self._storage.get(key)
            return ShardIndex.of(number, self._format, io.BytesIO(data))
        except NotFound as error:
            raise Conflict(f"{key} is gone: its shards are numbered without gaps") from error
        except ValueError as error:
            raise Conflict(f"{key}: {error}") from error

    def _commit(self, index: ShardIndex) -> None:
        """Writes the index of a shard that is there; somebody else may have written the same."""
        key = self._keys.index(index.number)
        if not self._create(key, index.to_bytes()):
            found = read_index(self._storage, self._keys, index.number)
            if found != index:
                raise Conflict(f"{key} does not say what {index.name} holds")
        self._note(index)

    def _note(self, index: ShardIndex) -> None:
        if index.format != self._format.name:
            raise Conflict(f"{self._keys.base or '/'} holds {index.format} shards, not {self._format.name}")
        if twice := self._packed.intersection(index.rows):
            raise Conflict(f"{index.name} holds {min(twice)}, which an earlier shard has")
        self._shards.append(index)
        self._packed.update(index.rows)
        self._pending.drop(index.rows)

    def _create(self, key: str, data: Data) -> bool:
        """True: this call made the object. False: it was there."""
        content_type = self._format.content_type if isinstance(data, Path) else JSON
        if self._storage.conditional_put:
            return self._storage.put_if_absent(key, data, content_type=content_type)
        if self._storage.head(key) is not None:
            return False
        self._storage.put(key, data, content_type=content_type)
        return True

    def _withdraw_success(self) -> bool:
        """A set that grows is not finished any more. Whether it was."""
        if self._storage.head(self._keys.success) is None:
            return False
        self._storage.delete([self._keys.success])
        return True

    def _restore_success(self) -> None:
        """Of a set that did not grow by us: it is finished when its total index names all shards."""
        try:
            total = self._storage.get(self._keys.total)
        except NotFound:
            return
        if not self._grown(total):
            self._storage.put(self._keys.success, success_mark(total), content_type="text/plain")

    def _grown(self, total: bytes) -> bool:
        """Whether there are shards that this total index does not name."""
        known = len(TotalIndex.model_validate_json(total).shards)
        return self._storage.head(self._keys.shard(known, self._format.extension)) is not None

    @contextmanager
    def _encoded(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="saggar-shard-") as folder:
            path = Path(folder) / f"shard.{self._format.extension}"
            self._format.write(self._pending, path)
            yield path
