"""A contact sheet of a run: its first pictures with their prompts, to look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from io import BytesIO
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

import numpy as np
from PIL import Image
from saggar.jobs.client import JobClient
from saggar.jobs.errors import SaggarError
from saggar.jobs.record import JobRecord
from saggar.storage.base import Storage, open_storage
from saggar.workers.contact_sheet import contact_sheet

MOST = 64
COLUMNS = 8


class SheetFailed(SaggarError):
    """A sheet could not be made. The run is none the worse for it."""


def write_sheet(client: JobClient, run: str, path: Path) -> Path:
    """Writes the sheet of a run's succeeded jobs, at most 64, in the order of submission. Raises SheetFailed."""
    try:
        sheet = _make(client, run)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sheet)
    except Exception as error:  # whatever a store, a picture or the disk raises
        raise SheetFailed(f"{path.name} could not be made: {type(error).__name__}: {error}") from error
    return path


def _make(client: JobClient, run: str) -> bytes:
    pictures, captions = [], []
    with _Outputs() as outputs:
        for record in islice(_succeeded(client, run), MOST):
            assert record.result is not None
            with Image.open(BytesIO(outputs.read(record.result.outputs[0].uri))) as picture:
                pictures.append(np.asarray(picture.convert("RGB")))
            captions.append(record.job.prompt)
    return contact_sheet(pictures, captions, min(COLUMNS, len(pictures)))


def _succeeded(client: JobClient, run: str) -> Iterator[JobRecord]:
    cursor: str | None = None
    while True:
        page = client.list(run=run, state="succeeded", cursor=cursor, newest_first=False)
        yield from page.records
        cursor = page.cursor
        if cursor is None:
            return


class _Outputs:
    """Reads outputs of ours by the names that records give them: a folder's file or an S3 object. Each bucket is
    opened once.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._stores: dict[str, Storage] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def read(self, uri: str) -> bytes:
        parts = urlsplit(uri)
        if parts.scheme == "file":
            return Path(unquote(parts.path)).read_bytes()
        return self._store(f"{parts.scheme}://{parts.netloc}").get(unquote(parts.path).lstrip("/"))

    def _store(self, root: str) -> Storage:
        if root not in self._stores:
            self._stores[root] = open_storage(root)
            self._stack.callback(self._stores[root].close)
        return self._stores[root]
