"""Rows of manifests: JSON lines, CSV, Parquet, a text file of prompts, or a folder that `datasets` reads.

Every reader is lazy and gives (line, row or what is wrong with it). In tables a column is a job's field by its name, by
`--column`, or because the model has a parameter of that name; what is left over is not used, and told.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from saggar.jobs.errors import ConfigError, InvalidJob
from saggar.jobs.runs.plan import INPUTS, JOB_FIELDS, OUTPUT, Row, parse_value, place
from saggar.jobs.schema import MAX_JOB_BYTES

T = TypeVar("T")
Line = tuple[int, Row | InvalidJob]
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
_TEXT = frozenset(
    {"prompt", "negative_prompt", "id", "model", "task", "tenant", "deadline", "not_before", "priority"}
)
_LONGEST_LINE = 4 * MAX_JOB_BYTES
_LONGEST_CELL = 16 << 20
_MOST_UNUSED = 100


@dataclass
class Columns:
    """Which column means what. `mapped`: source -> field; `params`: the parameters that the models have; `named`
    gives the URI of a local file for a kind of input; `unused` collects the columns that mean nothing."""

    mapped: Mapping[str, str] = field(default_factory=dict)
    params: frozenset[str] = frozenset()
    folder: Path = Path()
    named: Callable[[Path, str], str] = lambda path, kind: path.as_uri()
    unused: dict[str, None] = field(default_factory=dict)

    def row(self, record: Mapping[str, object], *, text: bool = False) -> Row:
        """A row of a table's record; `text`: its cells are texts, an empty one says nothing. Raises InvalidJob."""
        row: Row = {}
        for source in self.mapped:
            if source not in record:
                raise InvalidJob(
                    self.mapped[source], f"there is no column {source[:64]!r}", "the columns of the row"
                )
        for name, value in record.items():
            target = self.mapped.get(name) or (name if self._known(name) else None)
            if target is None:
                if len(self.unused) < _MOST_UNUSED:
                    self.unused[name] = None
            elif value is not None and not (text and value == ""):
                place(row, target, self._value(target, value, text))
        return row

    def _known(self, name: str) -> bool:
        plain = JOB_FIELDS | self.params | set(INPUTS) | set(OUTPUT) | {"params", "inputs", "output"}
        return name in plain or name.startswith(("params.", "inputs.", "output."))

    def _value(self, target: str, value: object, text: bool) -> object:
        kind = target.removeprefix("inputs.")
        if kind in INPUTS:
            return self._uris(kind, value)
        if target == "id" and isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not text or not isinstance(value, str) or target in _TEXT:
            return value
        if target == "tags" and not value.startswith("["):
            return [tag.strip() for tag in value.split(",")]
        return parse_value(value)

    def _uris(self, kind: str, value: object) -> object:
        """A path means a file beside the manifest."""
        if isinstance(value, dict) and isinstance(
            value.get("path"), str
        ):  # an image of `datasets`, not decoded
            value = value["path"]
        if isinstance(value, list):
            return [self._uris(kind, one) for one in value]
        if isinstance(value, str) and "://" not in value:
            try:
                path = (self.folder / value).resolve()
            except (ValueError, OSError, RuntimeError):  # NUL, a lone surrogate, links in a circle
                raise InvalidJob(f"inputs.{kind}", "is no path", "a file beside the manifest") from None
            return self.named(path, kind)
        return value

    def with_files(self, row: Row) -> Row:
        """A row of JSON whose `inputs` name local files, with their URIs. Raises InvalidJob."""
        inputs = row.get("inputs")
        if not isinstance(inputs, dict):
            return row
        known = {kind: self._uris(kind, value) for kind, value in inputs.items() if kind in INPUTS}
        return {**row, "inputs": {**inputs, **known}}


def check_manifest(path: Path) -> None:
    """What can be said before anything is opened. Raises ConfigError."""
    if not path.exists():
        raise ConfigError(f"{path}: no such file; give a manifest ({', '.join(SUFFIXES)}) or a folder of one")
    if not path.is_dir() and path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: what is in it? (allowed: {', '.join(SUFFIXES)}, or a folder)")


def read_rows(path: Path, columns: Columns) -> Iterator[Line]:
    """The rows of a manifest with their line or row numbers, from 1. Raises ConfigError for one that cannot be read."""
    check_manifest(path)
    columns.folder = path if path.is_dir() else path.parent
    if path.is_dir():
        return _datasets(path, columns)
    readers: Mapping[str, Callable[[Path, Columns], Iterator[Line]]] = {
        ".csv": _csv,
        ".tsv": _csv,
        ".parquet": _parquet,
        ".txt": _prompts,
    }
    return readers.get(path.suffix, _json_lines)(path, columns)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, text.strip()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None


def _prompts(path: Path, columns: Columns) -> Iterator[Line]:
    for number, text in _lines(path):
        yield number, {"prompt": text}


def _json_lines(path: Path, columns: Columns) -> Iterator[Line]:
    for number, text in _lines(path):
        try:
            row = _json_object(text)
            yield number, columns.row(row) if columns.mapped else columns.with_files(row)
        except InvalidJob as error:
            yield number, error


def _json_object(text: str) -> Row:
    allowed = "one JSON object a line"
    if len(text) > _LONGEST_LINE:
        raise InvalidJob("row", "is too large", f"a job of at most {MAX_JOB_BYTES} bytes as JSON")
    try:
        row = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError):  # ValueError alone: a number of more digits than Python reads
        raise InvalidJob("row", "is not JSON", allowed) from None
    if not isinstance(row, dict):
        raise InvalidJob("row", "is not a JSON object", allowed)
    return row


def _once(pairs: list[tuple[str, object]]) -> Row:
    row = dict(pairs)
    if len(row) != len(pairs):
        raise InvalidJob("row", "has the same name twice", "each name once")
    return row


def _csv(path: Path, columns: Columns) -> Iterator[Line]:
    last = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
            with _long_cells():
                names = table.fieldnames or []
            _check_header(path, names, columns)
            lines = table.reader  # the table's own number of lines is behind where there are empty ones
            last = lines.line_num
            while True:
                with _long_cells():
                    record = next(table, None)
                if record is None:
                    return
                last = lines.line_num
                yield last, _csv_row(record, columns)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    except csv.Error as error:
        raise ConfigError(f"{path}: the row that begins behind line {last}: {error}") from None


@contextmanager
def _long_cells() -> Iterator[None]:
    """A cell that no job can hold spoils its row, where its column is used, and not the table. csv has one limit for
    the whole process, which is put back; without any, a quote that is not closed would fill the memory."""
    before = csv.field_size_limit(_LONGEST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _csv_row(record: dict[str | None, object], columns: Columns) -> Row | InvalidJob:
    if None in record or any(value is None for value in record.values()):
        return InvalidJob("row", "has more or fewer cells than the header", "one cell for each column")
    try:
        return columns.row({str(name): value for name, value in record.items()}, text=True)
    except InvalidJob as error:
        return error


def _check_header(path: Path, names: Iterable[str], columns: Columns) -> None:
    """What is wrong with every row is said once."""
    found = list(names)
    if not found:
        raise ConfigError(f"{path} is empty: its first line names the columns")
    if len(set(found)) != len(found):
        raise ConfigError(f"{path}: two columns have the same name")
    if missing := [source for source in columns.mapped if source not in found]:
        raise ConfigError(
            f"{path}: there is no column {missing[0]!r}; there are {', '.join(map(repr, found))}"
        )
    if "prompt" not in found and "prompt" not in columns.mapped.values():
        raise ConfigError(
            f"{path}: no column is the prompt; say which: --column prompt=NAME, one of {', '.join(map(repr, found))}"
        )


def _parquet(path: Path, columns: Columns) -> Iterator[Line]:
    parquet = _optional("pyarrow.parquet")
    from pyarrow import ArrowException

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            _check_header(path, names, columns)
            number = 0
            for batch in file.iter_batches(batch_size=1_000):
                for record in batch.to_pylist():
                    number += 1
                    yield number, _tried(columns, record)
    except (ArrowException, OSError) as error:
        raise ConfigError(
            f"{path}: not a Parquet file that can be read: {str(error).splitlines()[0]}"
        ) from None


def _datasets(path: Path, columns: Columns) -> Iterator[Line]:
    datasets = _optional("datasets")
    datasets.disable_progress_bars()
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path), streaming=True)
    except Exception as error:  # noqa: BLE001 - whatever its readers raise
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{path}: `datasets` cannot read it: {why}") from None
    if isinstance(found, dict):
        if "train" not in found and len(found) > 1:
            raise ConfigError(f"{path}: several splits and none is train; there are {', '.join(found)}")
        found = found["train"] if "train" in found else next(iter(found.values()))
    for name, feature in (found.features or {}).items():
        if isinstance(feature, datasets.Image):  # a job names its picture, it does not hold it
            found = found.cast_column(name, datasets.Image(decode=False))
    if found.column_names:
        _check_header(path, found.column_names, columns)
    for number, record in enumerate(found, 1):
        yield number, _tried(columns, record)


def _tried(columns: Columns, record: Mapping[str, object]) -> Row | InvalidJob:
    try:
        return columns.row(record)
    except InvalidJob as error:
        return error


def _optional(module: str):  # type: ignore[no-untyped-def]  # noqa: ANN202 - a module without types
    """Raises ConfigError where it is not installed."""
    import importlib

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"this manifest needs {error.name}, which is not installed: pip install 'saggar[datasets]'"
        ) from None
