"""Many small objects of a folder made durable together: one flush of a folder for all that was written into it.

The order is that of a single object, step by step for the whole group: bytes, flush, name, flush of the folders. So
each object appears whole or not at all, and none is acknowledged before it would outlive a loss of power. The flushes
of a step are asked for side by side: the file system makes few of them, where one after the other each would be one.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from saggar.storage.files import opened_folder
from saggar.storage.keys import check_key

Publish = Callable[[str, int, str, int], None]
"""(temporary name, its open folder, final name, its open folder)"""


class Item(Protocol):
    """An object to be."""

    @property
    def key(self) -> str: ...
    @property
    def data(self) -> bytes: ...


Flush = Callable[[Sequence[int]], Sequence[OSError | None]]
"""fsync of many descriptors; for each None, or why it failed."""
KNOWN = 10_000


def flush_one(descriptor: int) -> OSError | None:
    """fsync; why it failed, if it did."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        return error
    return None


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
    """The opened folders below a root, each opened once, without following symbolic links.

    `known`: folders whose names are durable, kept from group to group. Whoever finds any other folder does not know
    whether its maker has flushed it yet, and flushes it too.
    """

    def __init__(self, root: Path, known: set[str], stack: ExitStack) -> None:
        self._stack = stack
        self._known = known
        self._open = {"": stack.enter_context(opened_folder(root))}
        self._changed: set[str] = set()

    def parent(self, key: str) -> tuple[str, str]:
        """The folder of a key, made when missing, and the key's last part."""
        path, _, name = key.rpartition("/")
        self._make(path)
        return path, name

    def descriptor(self, path: str) -> int:
        """Of a folder that `parent` gave."""
        return self._open[path]

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

    def _make(self, path: str) -> None:
        if path in self._open:
            return
        above, _, name = path.rpartition("/")
        self._make(above)
        try:
            folder = self._stack.enter_context(opened_folder(name, dir_fd=self._open[above]))
        except FileNotFoundError:
            with suppress(FileExistsError):  # somebody else was first
                os.mkdir(name, dir_fd=self._open[above])
            self._known.discard(path)
            folder = self._stack.enter_context(opened_folder(name, dir_fd=self._open[above]))
        self._open[path] = folder
        if path not in self._known:
            self._changed.add(above)


def place_all(
    root: Path, waiting: Path, items: Sequence[Item], publish: Publish, flush: Flush, known: set[str]
) -> Sequence[OSError | None]:
    """Puts every item under its key by way of a file in `waiting`; for each None, or why it is not there. `known` is
    the caller's, for Folders.

    Raises InvalidKey before anything is written, and OSError when nothing could be.
    """
    for item in items:
        check_key(item.key)
    placed = [_Placed(item, uuid.uuid4().hex) for item in items]
    with ExitStack() as stack:
        temporaries = stack.enter_context(opened_folder(waiting))
        folders = Folders(root, known, stack)
        for one in placed:
            with _noted(one):
                one.parent, one.name = folders.parent(one.item.key)
                one.file = _written(one, temporaries, stack)
        written = _going(placed)
        for one, error in zip(written, flush([one.file for one in written]), strict=True):
            one.error = error
        try:
            for one in _going(placed):
                with _noted(one):
                    publish(one.temporary, temporaries, one.name, folders.descriptor(one.parent))
                    folders.changed(one.parent)
        finally:
            for one in placed:
                with suppress(FileNotFoundError):  # it was renamed, or never written
                    os.unlink(one.temporary, dir_fd=temporaries)
        _share_failures(placed, folders.flush(flush))
    return [one.error for one in placed]


@contextmanager
def _noted(one: _Placed) -> Iterator[None]:
    """One item's failure is not that of the others."""
    try:
        yield
    except OSError as error:
        one.error = error


def _going(placed: Sequence[_Placed]) -> list[_Placed]:
    return [one for one in placed if one.error is None]


def _written(one: _Placed, folder: int, stack: ExitStack) -> int:
    """The open temporary file with the item's bytes, not flushed yet."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    file = os.open(one.temporary, flags, 0o644, dir_fd=folder)
    stack.callback(os.close, file)
    left = memoryview(one.item.data)
    while left:
        left = left[os.write(file, left) :]
    return file


def _share_failures(placed: Sequence[_Placed], failed: dict[str, OSError]) -> None:
    """A folder that could not be flushed fails everything in it and below it."""
    for path, error in failed.items():
        for one in _going(placed):
            if not path or one.parent == path or one.parent.startswith(f"{path}/"):
                one.error = error
