"""Messages between two processes of a group over a socket pair, large arrays through shared memory.

A segment is an anonymous memory file: it has no name, so nothing is left behind however either side ends. Its
descriptor travels with the message; the receiver maps it, and the arrays it gets are views of that
mapping, which lives as long as they do. Arrays are written compact: a view never ships its base. Only
what came through the group's own socket pair is unpickled.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import socket
import struct
import tempfile
import threading
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import numpy as np

_HEADER = struct.Struct("<QQ")
"""Bytes of the pickle, bytes of the segment (0: none, and then no descriptor follows)."""
_ALIGN = 64
SMALL = 16 * 1024
"""Arrays below this size travel inside the message."""
MAPPED = 8 * 1024 * 1024
"""Segments from this size on are mapped. A mapping costs a descriptor for as long as an array of it lives."""


class ChannelClosed(Exception):
    """The other side has gone."""


class Channel:
    """One end of a socket pair. One thread may receive while others send; sends are whole."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """For waiting with `select`."""
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Send any picklable object. ChannelClosed."""
        pickler = _Pickler()
        pickler.dump(message)
        body = pickler.buffer.getbuffer()
        segment = _write_segment(pickler.arrays) if pickler.arrays else None
        try:
            with self._sending:
                self._socket.sendall(_HEADER.pack(len(body), pickler.size))
                if segment is not None:
                    socket.send_fds(self._socket, [b"s"], [segment])
                self._socket.sendall(body)
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        finally:
            if segment is not None:
                os.close(segment)

    def receive(self) -> object:
        """Wait for the next message. ChannelClosed once the other side has gone."""
        try:
            length, size = _HEADER.unpack(self._read(_HEADER.size))
            segment = self._receive_segment(size) if size else None
            return _Unpickler(io.BytesIO(self._read(length)), segment).load()
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def close(self) -> None:
        """Close this end; a thread that waits in `receive` gets ChannelClosed."""
        with contextlib.suppress(OSError):  # the other side may have been quicker
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view, done = memoryview(data), 0
        while done < length:
            got = self._socket.recv_into(view[done:])
            if got == 0:
                raise ChannelClosed("the other process has closed the channel")
            done += got
        return data

    def _receive_segment(self, size: int) -> mmap.mmap | bytearray:
        _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not fds:
            raise ChannelClosed("a segment was announced and did not come")
        try:
            return mmap.mmap(fds[0], size) if size >= MAPPED else _read_segment(fds[0], size)
        finally:
            os.close(fds[0])


class _Pickler(pickle.Pickler):
    """Takes large arrays out of the message and gives them a place in the segment."""

    def __init__(self) -> None:
        self.buffer = io.BytesIO()
        super().__init__(self.buffer, protocol=5)
        self.arrays: list[tuple[int, np.ndarray]] = []
        self.size = 0

    def persistent_id(self, value: object) -> tuple[str, tuple[int, ...], int] | None:
        if type(value).__module__ != "numpy" or type(value).__name__ != "ndarray":
            return None
        found = cast("np.ndarray", value)
        if found.nbytes < SMALL or found.dtype.hasobject:
            return None
        offset = self.size
        self.arrays.append((offset, found))
        self.size = -(-(offset + found.nbytes) // _ALIGN) * _ALIGN
        return (found.dtype.str, found.shape, offset)


class _Unpickler(pickle.Unpickler):
    """Puts arrays back as views of the segment."""

    def __init__(self, file: io.BytesIO, segment: mmap.mmap | bytearray | None) -> None:
        super().__init__(file)
        self._segment = segment

    def persistent_load(self, place: tuple[str, tuple[int, ...], int]) -> np.ndarray:
        import numpy as np

        dtype, shape, offset = place
        assert self._segment is not None, "an array without its segment"
        return np.ndarray(shape, dtype, buffer=self._segment, offset=offset)


def _write_segment(arrays: list[tuple[int, np.ndarray]]) -> int:
    """A memory file with the arrays at their offsets; the caller closes the descriptor."""
    import numpy as np

    fd = _memory_file()
    try:
        last_offset, last = arrays[-1]
        os.ftruncate(fd, -(-(last_offset + last.nbytes) // _ALIGN) * _ALIGN)
        for offset, value in arrays:
            _write(fd, np.ascontiguousarray(value).data.cast("B"), offset)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read_segment(fd: int, size: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        done += os.preadv(fd, [view[done:]], done)
    return data


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("saggar")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
