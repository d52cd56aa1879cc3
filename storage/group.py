"""Many small objects of a folder made durable together: one flush of a folder for all that was written into it.

The order is that of a single object, step by step for the whole group: bytes, flush, name, flush of the folders. So
each object appears whole or not at all, and none is acknowledged before it would outlive a loss of power. The flushes
of a step are asked for side by side (flushers.py).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from saggar.storage.keys import check_key

Publish = Callable[[str, int, str, int], bool]
"""(temporary name, its open folder, final name, its open folder); whether the temporary name is gone by it"""


class Item(Protocol):
    """An object to be."""

    @property
    def key(self) -> str: ...
    @property
    def data(self) -> bytes: ...


Flush = Callable[[Sequence[int]], Sequence[OSError | None]]
"""fsync of many descriptors; for each None, or why it failed."""
KNOWN = 10_000
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


@dataclass(eq=False, slots=True)
class _Placed:
    """An item on its way: its temporary file, and in the end the answer for it."""

    item: Item
    temporary: str
    parent: str = ""
    name: str = ""
    file: int = -1
    error: OSError | None = None


class Folders:
    """The opened folders below a root, each opened once, without following symbolic links, and files opened in them.
    All are closed in the end.

    `known`: folders whose names are durable, kept from group to group. Whoever finds any other folder does not know
    whether its maker has flushed it yet, and flushes it too.
    """

    def __init__(self, root: Path, known: set[str]) -> None:
        """Raises OSError."""
        self._known = known
        self._open = {"": os.open(root, _FOLDER)}
        self._files: list[int] = []
        self._changed: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in (*self._files, *self._open.values()):
            os.close(descriptor)

    def folder(self, path: str) -> int:
        """Its descriptor; made when missing, with those above it."""
        if path not in self._open:
            self._open[path] = self._opened(path)
        return self._open[path]

    def create(self, name: str, path: str) -> int:
        """The descriptor of a file that must not exist."""
        file = os.open(name, _NEW, 0o644, dir_fd=self._open[path])
        self._files.append(file)
        return file

    def changed(self, path: str) -> None:
        """A name was put into this folder."""
        self._changed.add(path)

    def flush(self, flush: Flush) -> dict[str, OSError]:
        """Makes all new names durable; what failed, by folder."""
        changed = list(self._changed)
        errors = flush([self._open[path] for path in changed])
        failed = {path: error for path, error in zip(changed, errors, strict=True) if error is not None}
        if not failed:
            if len(self._known) > KNOWN:
                self._known.clear()
            self._known.update(self._open)
        return failed

    def _opened(self, path: str) -> int:
        above, _, name = path.rpartition("/")
        parent = self.folder(above)
        if path in self._known:
            with suppress(FileNotFoundError):
                return os.open(name, _FOLDER, dir_fd=parent)
        self._known.discard(path)
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=parent)
        self._changed.add(above)
        return os.open(name, _FOLDER, dir_fd=parent)


def place_all(
    root: Path, waiting: str, items: Sequence[Item], publish: Publish, flush: Flush, known: set[str]
) -> Sequence[OSError | None]:
    """Puts every item under its key by way of a file in the folder `waiting` of the root; for each None, or why it is
    not there. `known` is the caller's, for Folders.

    Raises InvalidKey before anything is written, and OSError when nothing could be.
    """
    for item in items:
        check_key(item.key)
    group = uuid.uuid4().hex
    placed = [_Placed(item, f"{group}-{number}") for number, item in enumerate(items)]
    with Folders(root, known) as folders:
        temporaries = folders.folder(waiting)
        try:
            for one in placed:
                _write(one, folders, waiting)
            written = _going(placed)
            for one, error in zip(written, flush([one.file for one in written]), strict=True):
                one.error = error
            for one in _going(placed):
                _name(one, folders, temporaries, publish)
        finally:
            for one in placed:
                if one.temporary:
                    with suppress(FileNotFoundError):
                        os.unlink(one.temporary, dir_fd=temporaries)
        _share_failures(placed, folders.flush(flush))
    return [one.error for one in placed]


def _write(one: _Placed, folders: Folders, waiting: str) -> None:
    """The item's bytes under a temporary name, not flushed yet. One item's failure is not that of the others."""
    try:
        one.parent, _, one.name = one.item.key.rpartition("/")
        folders.folder(one.parent)
        one.file = folders.create(one.temporary, waiting)
        left = memoryview(one.item.data)
        while left:
            left = left[os.write(one.file, left) :]
    except OSError as error:
        one.error = error


def _name(one: _Placed, folders: Folders, temporaries: int, publish: Publish) -> None:
    try:
        if publish(one.temporary, temporaries, one.name, folders.folder(one.parent)):
            one.temporary = ""
        folders.changed(one.parent)
    except OSError as error:
        one.error = error


def _going(placed: Sequence[_Placed]) -> list[_Placed]:
    return [one for one in placed if one.error is None]


def _share_failures(placed: Sequence[_Placed], failed: dict[str, OSError]) -> None:
    """A folder that could not be flushed fails everything in it and below it."""
    for path, error in failed.items():
        for one in _going(placed):
            if not path or one.parent == path or one.parent.startswith(f"{path}/"):
                one.error = error
