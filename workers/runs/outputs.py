"""Reading outputs by the names that records give them, wherever workers have put them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

from saggar.jobs.record import JobRecord
from saggar.jobs.runs import RunSpec
from saggar.storage.base import Storage, open_storage
from saggar.storage.errors import Conflict
from saggar.storage.keys import result_key
from saggar.storage.results import ManifestOutput, ResultManifest, read_result


@dataclass(frozen=True)
class Made:
    """A job's result in the store that holds it: the manifest, and its own key there."""

    storage: Storage
    key: str
    manifest: ResultManifest


def leads(output: ManifestOutput) -> bool:
    """Whether it is the first file of its output, or the only one."""
    return not output.part


class Outputs:
    """A folder's files or S3 objects. Each store is opened once."""

    def __init__(self, opener: Callable[[str], Storage] | None = None) -> None:
        """`opener`: from a store's URL without its closing slash to the store; None: open_storage."""
        self._opener = opener
        self._stack = ExitStack()
        self._stores: dict[str, Storage] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def read(self, uri: str) -> bytes:
        """An object's bytes. Raises StorageError, OSError."""
        parts = urlsplit(uri)
        if parts.scheme == "file":
            return Path(unquote(parts.path)).read_bytes()
        return self.store(f"{parts.scheme}://{parts.netloc}").get(unquote(parts.path).lstrip("/"))

    def result(self, record: JobRecord) -> Made:
        """The manifest of a job that has succeeded. Raises NotFound, Conflict, StorageError."""
        storage, key = self.place(record)
        return Made(storage, key, read_result(storage, key))

    def forget(self, record: JobRecord, spec: RunSpec) -> None:
        """A result of this run that is not whole any more is none: without it the job is made anew. Nothing but what is
        the run's own to remove. Raises StorageError."""
        try:
            storage, key = self.place(record)
        except Conflict:  # it is nowhere
            return
        if record.job.run == spec.name if spec.format == "objects" else key.startswith(f"{spec.prefix}/"):
            storage.delete([key])

    def place(self, record: JobRecord) -> tuple[Storage, str]:
        """Where that manifest is: its store, and its key there. Raises Conflict."""
        uri = record.result.manifest if record.result else None
        if uri is None:
            raise Conflict(f"the record of job {record.id} names no manifest")
        key = result_key(record.job.output.prefix, record.id)
        root = unquote(uri).removesuffix(f"/{key}")
        if root == unquote(uri):
            raise Conflict(f"the manifest of job {record.id} lies under another key than {key}")
        return self.store(root), key

    def stores(self) -> list[Storage]:
        """Those that were opened."""
        return list(self._stores.values())

    def store(self, root: str) -> Storage:
        """By a URL without its closing slash."""
        if root not in self._stores:
            self._stores[root] = (self._opener or open_storage)(root)
            self._stack.callback(self._stores[root].close)
        return self._stores[root]


def remove(made: Made) -> None:
    """A result's objects, what names them last."""
    made.storage.delete([file.key for file in made.manifest.files()])
    made.storage.delete([made.key])
