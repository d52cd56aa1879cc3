"""The outline of a model folder that lies elsewhere: all small files, and of weights what tells about them, their
header, start and end. Between those are holes, so that it inspects like the folder itself and is never to be loaded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from saggar.engine.errors import LoadError
from saggar.engine.models.source.checkpoint import LARGE_BYTES, SAMPLE_BYTES
from saggar.engine.models.source.files import WEIGHTS
from saggar.engine.models.source.weights import LONGEST_HEADER

AT_ONCE = 8
Read = Callable[[str, int, int], bytes]
"""Bytes `[first, end)` of a file by its name: `read(name, first, end)`."""


def write_outline(folder: Path, sizes: Mapping[str, int], read: Read) -> None:
    """Writes those files, named relative to the folder, whose sizes are in bytes. Raises what `read` raises; LoadError:
    a name leads out of the folder.
    """
    for name in sizes:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name:
            raise LoadError(f"{name[:100]!r} is not the name of a file in a model's folder")
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="saggar-outline") as pool:
        futures = [pool.submit(_write, folder / name, name, size, read) for name, size in sizes.items()]
    for future in futures:
        future.result()


def _write(target: Path, name: str, size: int, read: Read) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if size <= LARGE_BYTES or not name.endswith(WEIGHTS):
        target.write_bytes(read(name, 0, size) if size else b"")
        return
    start = read(name, 0, SAMPLE_BYTES)
    with target.open("wb") as file:
        file.write(start)
        header = 8 + int(struct.unpack("<Q", start[:8])[0])
        if SAMPLE_BYTES < header <= min(8 + LONGEST_HEADER, size):
            file.write(read(name, SAMPLE_BYTES, header))
        file.seek(size - SAMPLE_BYTES)
        file.write(read(name, size - SAMPLE_BYTES, size))
