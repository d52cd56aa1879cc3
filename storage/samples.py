"""What shards are made of: samples, checked, and a spool that keeps a shard's worth of them on disk."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import JsonValue

MAX_KEY = 80  # with the longest extension it fits into a plain tar header
_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)  # no dot: WebDataset takes the first one for the key's end
_EXTENSION = re.compile(r"[a-z0-9]{1,8}(\.[a-z0-9]{1,8})?", re.ASCII)
_RESERVED = ("json", "txt")  # of the metadata and the caption


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of a data set.

    `key`: its id, 1 to 80 of `A-Z a-z 0-9 _ -`. `files`: bytes by extension, such as `png` or `latent.npy`; the first
    is the picture. `metadata`: JSON values. Those named in `shard_formats.COLUMNS` become columns of Parquet.
    """

    key: str
    files: Mapping[str, bytes]
    caption: str = ""
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)

    @property
    def primary(self) -> str | None:
        """The extension of the picture: the first file."""
        return next(iter(self.files), None)

    def record(self) -> dict[str, JsonValue]:
        """The metadata with `key` and the picture's `sha256`, which is computed unless there is no picture."""
        record: dict[str, JsonValue] = {**self.metadata, "key": self.key}
        if self.primary is not None:
            record["sha256"] = hashlib.sha256(self.files[self.primary]).hexdigest()
        return record

    def check(self) -> None:
        """Raises ValueError naming the key and what is wrong with it."""
        if not _KEY.fullmatch(self.key) or len(self.key) > MAX_KEY:
            raise ValueError(
                f"a sample's key has 1 to {MAX_KEY} letters, digits, _ and -, not {self.key[:100]!r}"
            )
        for extension in self.files:
            if not _EXTENSION.fullmatch(extension) or extension in _RESERVED:
                raise ValueError(
                    f"{self.key}: {extension!r} is no extension of a sample's file (png, latent.npy …)"
                )
        try:
            self.caption.encode()
            record = json_bytes(self.record())
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.key}: caption and metadata must be JSON: {error}") from error
        said = self.metadata.get("sha256")
        if self.primary is not None and said not in (None, json.loads(record)["sha256"]):
            raise ValueError(f"{self.key}: its bytes are not those whose sha256 the metadata gives")


def json_bytes(value: Mapping[str, JsonValue]) -> bytes:
    """UTF-8 JSON with sorted keys: equal values are equal bytes. ValueError for NaN and lone surrogates."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False).encode()


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a sample lies in the spool: its head (JSON), then its files, one after the other."""

    offset: int
    head: int
    files: tuple[tuple[str, int], ...]

    @property
    def bytes(self) -> int:
        return self.head + sum(size for _, size in self.files)


class SampleSpool:
    """Samples in the order of their coming, in a file without a name: it is gone when the process is.

    Memory holds their keys and places alone.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by close)
        self._entries: dict[str, _Entry] = {}
        self._end = 0
        self.bytes = 0
        """What its samples weigh: heads and files."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def append(self, sample: Sample) -> None:
        """Raises OSError when the disk is full; the sample is then not in."""
        head = json_bytes({"caption": sample.caption, "metadata": dict(sample.metadata)})
        self._file.seek(self._end)
        end = self._end + self._file.write(head)
        files = []
        for extension, data in sample.files.items():
            end += self._file.write(data)
            files.append((extension, len(data)))
        entry = self._entries[sample.key] = _Entry(self._end, len(head), tuple(files))
        self._end = end
        self.bytes += entry.bytes

    def drop(self, keys: Collection[str]) -> None:
        """Forgets these; keys it does not hold are no error."""
        for key in keys:
            if (entry := self._entries.pop(key, None)) is not None:
                self.bytes -= entry.bytes
        if not self._entries:
            self._file.seek(0)
            self._file.truncate()
            self._end = 0

    def __iter__(self) -> Iterator[Sample]:
        """One sample at a time in memory."""
        for key, entry in self._entries.items():
            self._file.seek(entry.offset)
            head = json.loads(self._file.read(entry.head))
            files = {extension: self._file.read(size) for extension, size in entry.files}
            yield Sample(key, files, head["caption"], head["metadata"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The samples are gone."""
        self._file.close()
