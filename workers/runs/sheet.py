"""A contact sheet of a run: its first pictures with their prompts, to look at."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from saggar.jobs.errors import SaggarError
from saggar.workers.contact_sheet import contact_sheet
from saggar.workers.stills import still_of

NAME = "contact-sheet.png"
MOST = 64
COLUMNS = 8


class SheetFailed(SaggarError):
    """A sheet could not be made. The run is none the worse for it."""


def make_sheet(pictures: Iterable[tuple[bytes, str]]) -> bytes:
    """A PNG of the first 64 files with their captions: pictures, four frames of a video, a sound's wave.

    Raises SheetFailed.
    """
    arrays, captions = [], []
    try:
        for data, caption in islice(pictures, MOST):
            arrays.append(still_of(data))
            captions.append(caption)
        return contact_sheet(arrays, captions, min(COLUMNS, len(arrays)))
    except Exception as error:  # whatever a store or a picture raises
        raise SheetFailed(f"{NAME} could not be made: {type(error).__name__}: {error}") from error
