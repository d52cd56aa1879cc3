"""A contact sheet of a run: its first pictures with their prompts, to look at."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from itertools import islice
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
from PIL import Image
from saggar.jobs.client import JobClient
from saggar.jobs.record import JobRecord
from saggar.storage.base import open_storage
from saggar.workers.contact_sheet import contact_sheet

MOST = 64
COLUMNS = 8


def write_sheet(client: JobClient, run: str, path: Path) -> Path:
    """Writes the sheet of a run's succeeded jobs, at most 64, in the order of submission."""
    pictures, captions = [], []
    for record in islice(_succeeded(client, run), MOST):
        assert record.result is not None
        first = record.result.outputs[0]
        with Image.open(BytesIO(_read(first.uri))) as picture:
            pictures.append(np.asarray(picture.convert("RGB")))
        captions.append(record.job.prompt)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contact_sheet(pictures, captions, min(COLUMNS, len(pictures))))
    return path


def _succeeded(client: JobClient, run: str) -> Iterator[JobRecord]:
    cursor: str | None = None
    while True:
        page = client.list(run=run, state="succeeded", cursor=cursor, newest_first=False)
        yield from page.records
        cursor = page.cursor
        if cursor is None:
            return


def _read(uri: str) -> bytes:
    """The bytes of an output of ours: its record names a folder's file or an S3 object."""
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path)).read_bytes()
    storage = open_storage(f"{parts.scheme}://{parts.netloc}")
    try:
        return storage.get(unquote(parts.path).lstrip("/"))
    finally:
        storage.close()
