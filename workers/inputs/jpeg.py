"""How much work a JPEG is: it may ask for its whole picture to be gone through again and again, for a hundred bytes."""

from __future__ import annotations

import mmap
import re
from typing import IO

from saggar.workers.inputs.bad import BadInput

MOST_SCANS = 128
"""Encoders write about ten, optimisers some twenty."""
MOST_SEGMENTS = 10_000
_SOI, _EOI, _SOS, _TEM = 0xD8, 0xD9, 0xDA, 0x01
_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])", re.DOTALL)  # not a stuffed byte, not a restart
_ALLOWED = f"at most {MOST_SCANS} scans and {MOST_SEGMENTS} segments"


def check_work(file: IO[bytes]) -> None:
    """Walks the markers up to the picture's end (ITU-T T.81, B.1); what is cut short is another's to find. Raises
    BadInput for too many passes."""
    scans = segments = 0
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 0
        while (marker := _MARKER.search(data, at)) is not None:
            kind, at = marker[1][0], marker.end()
            if kind == _EOI:
                return
            if kind not in (_SOI, _TEM):  # all others say how long they are
                at += int.from_bytes(data[at : at + 2], "big")
            scans += kind == _SOS
            segments += 1
            if scans > MOST_SCANS or segments > MOST_SEGMENTS:
                raise BadInput("is a JPEG of too many scans or segments", _ALLOWED)
