"""Messages between two processes of a group over a socket pair, large arrays through shared memory.

Memory is shared within one machine only: over a connection to another node arrays travel inside the message. What is
large, the results, comes from rank 0, which lives on the engine's own node.

A segment is an anonymous memory file: it has no name, so nothing is left behind however either side ends. Its
descriptor travels with the message. Up to a few megabytes it is read and closed; above, it is mapped, the arrays
are views of the mapping, and once they are gone it is used again (segments.py). Arrays are written compact: a view
never ships its base. Only what came through the group's own socket pair, or over a connection that has proven its key
(executor/keyed.py), is unpickled.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import socket
import struct
import threading
from typing import cast

import numpy as np
from saggar.engine.worker.segments import Lease, Loans, Pool, memory_file, write_arrays

_HEADER = struct.Struct("<QQQ?HH")
"""Bytes of the pickle, bytes of the segment (0: none), its id (0: used once), whether its descriptor follows, and how
many ids of segments follow that are given back and that are forgotten.
"""
_ID = struct.Struct("<Q")
_ALIGN = 64
SMALL = 16 * 1024
"""Arrays below this size travel inside the message."""
MAPPED = 8 * 1024 * 1024
"""Segments from this size on are mapped."""


class ChannelClosed(Exception):
    """The other side has gone."""


class Channel:
    """One end of a socket pair. One thread may receive while others send; sends are whole."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._shares = sock.family == socket.AF_UNIX
        self._sending = threading.Lock()
        self._pool = Pool()
        self._loans = Loans()

    def fileno(self) -> int:
        """For waiting with `select`."""
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Send any picklable object. ChannelClosed."""
        pickler = _Pickler(self._shares)
        pickler.dump(message)
        body = pickler.buffer.getbuffer()
        if pickler.size >= MAPPED:
            segment = self._pool.lend(pickler.size)
            segment.write(pickler.arrays)
            self._send(body, pickler.size, segment.id, segment.fd)
            segment.sent()
        elif pickler.arrays:
            fd = memory_file()
            try:
                os.ftruncate(fd, pickler.size)
                write_arrays(fd, pickler.arrays)
                self._send(body, pickler.size, 0, fd)
            finally:
                os.close(fd)
        else:
            self._send(body, 0, 0, None)

    def receive(self) -> object:
        """Wait for the next message. ChannelClosed once the other side has gone."""
        try:
            length, size, ident, with_fd, returned, forgotten = _HEADER.unpack(self._read(_HEADER.size))
            ids = [found for (found,) in _ID.iter_unpack(self._read(_ID.size * (returned + forgotten)))]
            self._pool.take_back(ids[:returned])
            self._loans.forget(ids[returned:])
            segment = self._receive_segment(size, ident, with_fd) if size else None
            return _Unpickler(io.BytesIO(self._read(length)), segment).load()
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def close(self) -> None:
        """Close this end; a thread that waits in `receive` gets ChannelClosed."""
        with contextlib.suppress(OSError):  # the other side may have been quicker
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._pool.close()
        self._loans.close()

    def _send(self, body: memoryview, size: int, ident: int, fd: int | None) -> None:
        try:
            with self._sending:
                returned, forgotten = self._loans.returned(), self._pool.forgotten()
                ids = b"".join(map(_ID.pack, [*returned, *forgotten]))
                header = _HEADER.pack(len(body), size, ident, fd is not None, len(returned), len(forgotten))
                self._socket.sendall(header + ids)
                if fd is not None:
                    socket.send_fds(self._socket, [b"s"], [fd])
                self._socket.sendall(body)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view, done = memoryview(data), 0
        while done < length:
            got = self._socket.recv_into(view[done:])
            if got == 0:
                raise ChannelClosed("the other process has closed the channel")
            done += got
        return data

    def _receive_segment(self, size: int, ident: int, with_fd: bool) -> Lease | bytearray:
        if not with_fd:
            return self._loans.borrow(ident, None)
        _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not fds:
            raise ChannelClosed("a segment was announced and did not come")
        try:
            return self._loans.borrow(ident, fds[0]) if ident else _read_segment(fds[0], size)
        finally:
            os.close(fds[0])


class _Pickler(pickle.Pickler):
    """Takes large arrays out of the message and gives them a place in the segment, where there can be one."""

    def __init__(self, shares: bool) -> None:
        self.buffer = io.BytesIO()
        super().__init__(self.buffer, protocol=5)
        self.arrays: list[tuple[int, np.ndarray]] = []
        self.size = 0
        self._shares = shares

    def persistent_id(self, value: object) -> tuple[str, tuple[int, ...], int] | None:
        if not self._shares or type(value).__module__ != "numpy" or type(value).__name__ != "ndarray":
            return None
        found = cast(np.ndarray, value)
        if found.nbytes < SMALL or found.dtype.hasobject:
            return None
        offset = self.size
        self.arrays.append((offset, found))
        self.size = -(-(offset + found.nbytes) // _ALIGN) * _ALIGN
        return (found.dtype.str, found.shape, offset)


class _Unpickler(pickle.Unpickler):
    """Puts arrays back as views of the segment."""

    def __init__(self, file: io.BytesIO, segment: Lease | bytearray | None) -> None:
        super().__init__(file)
        self._segment = segment

    def persistent_load(self, place: tuple[str, tuple[int, ...], int]) -> np.ndarray:
        dtype, shape, offset = place
        assert self._segment is not None, "an array without its segment"
        return np.ndarray(shape, dtype, buffer=self._segment, offset=offset)


def _read_segment(fd: int, size: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        done += os.preadv(fd, [view[done:]], done)
    return data
