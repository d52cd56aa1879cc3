"""Durable files: written whole, flushed to the disk, then given their name.

A rename or a link is atomic but not durable by itself: the folder that holds the name is flushed as well.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

Data = bytes | Path


@contextmanager
def opened_folder(path: str | Path, *, dir_fd: int | None = None, follow: bool = False) -> Iterator[int]:
    """A descriptor of a folder; a symbolic link in its place is refused (OSError) unless `follow`."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    folder = os.open(path, flags, dir_fd=dir_fd)
    try:
        yield folder
    finally:
        os.close(folder)


def sha256_of(data: Data) -> str:
    """Hexadecimal, of bytes or of a file's content."""
    if not isinstance(data, Path):
        return hashlib.sha256(data).hexdigest()
    with data.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def opened_data(data: Data) -> Iterator[bytes | IO[bytes]]:
    """Bytes as they are, a file opened."""
    if isinstance(data, Path):
        with data.open("rb") as file:
            yield file
    else:
        yield data


def size_of(data: Data) -> int:
    """In bytes."""
    return data.stat().st_size if isinstance(data, Path) else len(data)


def write_new(name: str, data: Data, *, dir_fd: int) -> None:
    """Create a file that must not exist and flush its bytes; its name in the folder is not yet durable."""
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=dir_fd)
    with os.fdopen(descriptor, "wb") as file:
        if isinstance(data, Path):
            with data.open("rb") as source:
                shutil.copyfileobj(source, file, 1 << 20)
        else:
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def make_folders(path: Path) -> None:
    """Create a folder with its parents, each entry durable."""
    if path.is_dir():
        return
    make_folders(path.parent)
    path.mkdir(exist_ok=True)
    flush_folder(path.parent)


def flush_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    with opened_folder(path, follow=True) as folder:
        os.fsync(folder)
