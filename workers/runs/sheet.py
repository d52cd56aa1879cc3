"""A contact sheet of a run: its first pictures with their prompts, to look at."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image
from saggar.jobs.client import JobClient
from saggar.jobs.errors import SaggarError
from saggar.jobs.record import JobRecord
from saggar.workers.contact_sheet import contact_sheet
from saggar.workers.runs.outputs import Outputs

MOST = 64
COLUMNS = 8


class SheetFailed(SaggarError):
    """A sheet could not be made. The run is none the worse for it."""


def write_sheet(client: JobClient, run: str, path: Path) -> Path:
    """Writes the sheet of a run's succeeded jobs, at most 64, in the order of submission. Raises SheetFailed."""
    sheet = make_sheet(client, run, path.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sheet)
    except OSError as error:
        raise SheetFailed(f"{path.name} could not be made: {type(error).__name__}: {error}") from error
    return path


def make_sheet(client: JobClient, run: str, name: str = "contact-sheet.png") -> bytes:
    """The sheet as PNG. Raises SheetFailed."""
    try:
        return _make(client, run)
    except Exception as error:  # whatever a store or a picture raises
        raise SheetFailed(f"{name} could not be made: {type(error).__name__}: {error}") from error


def _make(client: JobClient, run: str) -> bytes:
    pictures, captions = [], []
    with Outputs() as outputs:
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
