"""The files that shards can be: WebDataset tar and Parquet. The same samples in the same order are the same bytes.

WebDataset: a sample is `{key}.{extension}` for each file, `{key}.json` with its metadata and `{key}.txt` with its
caption, next to each other in a plain tar.

Parquet: a row a sample, with the columns of `SCHEMA`: the picture as `datasets` keeps it, so that it decodes by
itself, or its URI alone. Equal bytes hold for one version of pyarrow, which writes its name into the file.
"""

from __future__ import annotations

import importlib
import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import IO, Protocol, cast

from pydantic import JsonValue
from saggar.storage.errors import StorageConfigError
from saggar.storage.samples import Sample, json_bytes

PICTURES = ("png", "webp", "jpg")
COLUMNS: Mapping[str, type] = {
    "seed": int,
    "width": int,
    "height": int,
    "sha256": str,
    "uri": str,
    "model": str,
    "revision": str,
    "numerics": str,
}
"""Metadata that has a column of its own in Parquet: the name and the type that it must have."""

_ROW_GROUP_BYTES = 32 << 20
_ROW_GROUP_ROWS = 1000
Row = dict[str, object]


class ShardFormat(Protocol):
    """A kind of file that holds samples."""

    @property
    def name(self) -> str: ...
    @property
    def extension(self) -> str: ...
    @property
    def content_type(self) -> str: ...

    def check(self, sample: Sample) -> None:
        """Raises ValueError for a sample that this format cannot hold."""

    def write(self, samples: Iterable[Sample], target: Path) -> None:
        """Writes a file; a few megabytes of samples are in memory at a time."""

    def read(self, source: IO[bytes]) -> Iterator[Sample]:
        """The samples of a seekable file. Raises ValueError when it is not one of this format."""


class WebDataset:
    """Plain (ustar) tar without times, owners or permissions of anybody's."""

    name = "webdataset"
    extension = "tar"
    content_type = "application/x-tar"

    def check(self, sample: Sample) -> None:
        if not sample.files:
            raise ValueError(f"{sample.key}: a WebDataset sample needs a file; a URI alone fits into Parquet")

    def write(self, samples: Iterable[Sample], target: Path) -> None:
        with tarfile.open(target, "w", format=tarfile.USTAR_FORMAT) as tar:
            for sample in samples:
                parts = {**sample.files, "json": json_bytes(sample.record()), "txt": sample.caption.encode()}
                for extension, data in parts.items():
                    member = tarfile.TarInfo(f"{sample.key}.{extension}")  # mtime 0, uid 0, mode 0644
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))

    def read(self, source: IO[bytes]) -> Iterator[Sample]:
        try:
            with tarfile.open(fileobj=source, mode="r:") as tar:
                members = ((*member.name.partition("."), tar.extractfile(member)) for member in tar)
                for key, group in groupby(members, key=lambda member: member[0]):
                    files = {extension: file.read() for _, _, extension, file in group if file is not None}
                    yield Sample(key, files, files.pop("txt").decode(), json.loads(files.pop("json")))
        except (tarfile.TarError, KeyError) as error:
            raise ValueError(f"not a shard of ours: {error}") from error


class Parquet:
    """The picture's bytes are stored as they are, the other columns with zstd; row groups of 32 MiB."""

    name = "parquet"
    extension = "parquet"
    content_type = "application/vnd.apache.parquet"

    def check(self, sample: Sample) -> None:
        if not sample.files and not sample.metadata.get("uri"):
            raise ValueError(f"{sample.key}: it has neither a file nor a `uri` in its metadata")
        for name, kind in COLUMNS.items():
            value = sample.metadata.get(name)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise ValueError(f"{sample.key}: {name} is {kind.__name__}, not {type(value).__name__}")

    def write(self, samples: Iterable[Sample], target: Path) -> None:
        parquet = _pyarrow().parquet
        schema = _schema()
        plain = {"image.bytes", "files.list.element.bytes"}
        names = [*COLUMNS, "key", "caption", "parameters", "metadata", "image.path"]
        compression = dict.fromkeys(plain, "NONE") | dict.fromkeys(names, "ZSTD")
        repeated = ["model", "revision", "numerics"]
        with parquet.ParquetWriter(
            target, schema, compression=compression, use_dictionary=repeated, write_statistics=names
        ) as writer:
            for rows in _groups(samples):
                writer.write_table(_pyarrow().Table.from_pylist(rows, schema), row_group_size=len(rows))

    def read(self, source: IO[bytes]) -> Iterator[Sample]:
        pyarrow = _pyarrow()
        try:
            file = pyarrow.parquet.ParquetFile(source)
            for group in range(file.num_row_groups):
                for row in file.read_row_group(group).to_pylist():
                    yield _sample(row)
        except (pyarrow.ArrowException, KeyError) as error:
            raise ValueError(f"not a shard of ours: {error}") from error


FORMATS: Mapping[str, ShardFormat] = {kind.name: kind for kind in (WebDataset(), Parquet())}


def shard_format(name: str) -> ShardFormat:
    """Raises StorageConfigError for a name that is none, and where Parquet's library is missing."""
    if name not in FORMATS:
        raise StorageConfigError(f"{name!r} is no format of shards; there are {', '.join(FORMATS)}")
    if name == Parquet.name:
        _pyarrow()
    return FORMATS[name]


def _groups(samples: Iterable[Sample]) -> Iterator[list[Row]]:
    rows: list[Row] = []
    size = 0
    for sample in samples:
        rows.append(_row(sample))
        size += sum(map(len, sample.files.values()))
        if size >= _ROW_GROUP_BYTES or len(rows) >= _ROW_GROUP_ROWS:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _row(sample: Sample) -> Row:
    record = sample.record()
    picture = sample.primary if sample.primary in PICTURES else None
    return {
        "key": sample.key,
        "image": {"bytes": sample.files[picture], "path": f"{sample.key}.{picture}"} if picture else None,
        "caption": sample.caption,
        **{name: record.get(name) for name in COLUMNS},
        "parameters": _json(record.get("parameters", {})),
        "metadata": _json(record),
        "files": [
            {"extension": extension, "bytes": data}
            for extension, data in sample.files.items()
            if extension != picture
        ],
    }


def _sample(row: Mapping[str, object]) -> Sample:
    files: dict[str, bytes] = {}
    if row["image"] is not None:
        image = cast("Mapping[str, object]", row["image"])
        files[str(image["path"]).partition(".")[2]] = cast("bytes", image["bytes"])
    for file in cast("list[Mapping[str, object]]", row["files"]):
        files[str(file["extension"])] = cast("bytes", file["bytes"])
    metadata = cast("dict[str, JsonValue]", json.loads(str(row["metadata"])))
    return Sample(str(row["key"]), files, str(row["caption"]), metadata)


def _schema() -> object:
    """The columns, with what `datasets` wants to know to decode pictures."""
    pa = _pyarrow()
    types = {str: pa.string(), int: pa.int64()}
    columns = {
        "key": pa.string(),
        "image": pa.struct({"bytes": pa.binary(), "path": pa.string()}),
        "caption": pa.string(),
        **{name: types[kind] for name, kind in COLUMNS.items()},
        "parameters": pa.string(),
        "metadata": pa.string(),
        "files": pa.list_(pa.struct({"extension": pa.string(), "bytes": pa.binary()})),
    }
    features: dict[str, JsonValue] = {
        name: {"dtype": "int64" if kind == pa.int64() else "string", "_type": "Value"}
        for name, kind in columns.items()
    }
    features["image"] = {"_type": "Image"}
    value: dict[str, JsonValue] = {"_type": "Value"}
    features["files"] = [{"extension": {**value, "dtype": "string"}, "bytes": {**value, "dtype": "binary"}}]
    return pa.schema(
        columns.items(),
        metadata={"huggingface": json.dumps({"info": {"features": features}}, sort_keys=True)},
    )


def _json(value: JsonValue) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _pyarrow() -> ModuleType:
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise StorageConfigError("Parquet needs pyarrow: install saggar[datasets]") from error
