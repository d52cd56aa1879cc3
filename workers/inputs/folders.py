"""A file of an allowed folder: opened part by part without following a symbolic link, and a plain file only."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from saggar.storage.files import opened_folder
from saggar.workers.inputs.bad import BadInput
from saggar.workers.inputs.policy import Place, Source
from saggar.workers.inputs.web import too_large

_PIECE = 1 << 20
_ALLOWED = "plain files below an allowed folder, without symbolic links on the way"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would be waited for
_MISSING = (errno.ENOENT, errno.ENOTDIR)
_CLOSED = (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.ENAMETOOLONG, errno.EISDIR)


def copy_file(place: Place, source: Source, target: IO[bytes], limit: int) -> None:
    """Copies at most `limit` bytes into `target`. Raises BadInput; OSError when the disk fails."""
    parts = place.path.removeprefix(source.path).split("/")
    if not all(parts):
        raise BadInput("is no file's path", _ALLOWED)
    try:
        with ExitStack() as stack:
            here = stack.enter_context(opened_folder(Path(source.path), follow=True))
            for part in parts[:-1]:
                here = stack.enter_context(opened_folder(part, dir_fd=here))
            file = stack.enter_context(os.fdopen(os.open(parts[-1], _READ, dir_fd=here), "rb"))
            _copy(file, target, limit)
    except OSError as error:
        if error.errno in _MISSING:
            raise BadInput("there is no such file", _ALLOWED) from error
        if error.errno in _CLOSED:
            raise BadInput("is a file that cannot be opened", _ALLOWED) from error
        raise


def _copy(file: IO[bytes], target: IO[bytes], limit: int) -> None:
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        raise BadInput("is no plain file", _ALLOWED)
    if found.st_size > limit:
        raise too_large(limit)
    left = limit
    while piece := file.read(_PIECE):  # it may grow meanwhile
        left -= len(piece)
        if left < 0:
            raise too_large(limit)
        target.write(piece)
