"""Connections between the nodes of a group: both sides prove that they hold the same key before either believes a byte.

Each side sends 32 random bytes and answers the other's with an HMAC over both; the key itself never travels, and is in
no log line and no error. Up to then nothing is parsed, and nothing is unpickled here at all: agent and head speak lines
of JSON. What follows is neither encrypted nor signed: nodes belong on a network of their own.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import socket
import threading
import time
from pathlib import Path
from typing import TypeAlias

from saggar.engine.errors import Unsupported

KEY_VARIABLE = "SAGGAR_NODE_KEY"
HANDSHAKE_S = 10.0
_HELLO = b"saggar nodes 1\n\0"
_YES, _NO = b"\1", b"\0"
_NONCE = 32
_MAC = 32
_SHORTEST = 16
_LONGEST_LINE = 1 << 20

Line: TypeAlias = dict[str, object]


class Refused(Exception):
    """The other side does not hold the same key, or does not speak this protocol."""


class Gone(Exception):
    """The connection has ended."""


def read_key(key_file: str | None) -> bytes:
    """The key that all nodes share, from the file, else from SAGGAR_NODE_KEY. Unsupported: none, or too short."""
    if key_file is not None:
        try:
            key = Path(key_file).read_bytes().strip()
        except OSError as error:
            raise Unsupported(f"the nodes' key cannot be read: {error}") from error
    else:
        key = os.environ.get(KEY_VARIABLE, "").strip().encode()
    if len(key) < _SHORTEST:
        where = key_file or KEY_VARIABLE
        raise Unsupported(f"{where}: the nodes need a shared key of at least {_SHORTEST} characters")
    return key


def connect(address: tuple[str, int], key: bytes) -> socket.socket:
    """A proven connection to the head. OSError: nobody is there; Gone: it left; Refused."""
    sock = socket.create_connection(address, HANDSHAKE_S)
    end = time.monotonic() + HANDSHAKE_S
    try:
        if _read(sock, len(_HELLO), end) != _HELLO:
            raise Refused("what answers there is no head of this version")
        theirs, mine = _read(sock, _NONCE, end), secrets.token_bytes(_NONCE)
        sock.sendall(mine + _mac(key, b"node", theirs, mine))
        if _read(sock, 1, end) != _YES:
            raise Refused("the head holds another key")
        if not hmac.compare_digest(_read(sock, _MAC, end), _mac(key, b"head", theirs, mine)):
            raise Refused("the head does not hold this node's key")
        return _ready(sock)
    except BaseException:
        sock.close()
        raise


def accept(sock: socket.socket, key: bytes) -> socket.socket:
    """The head's side of a fresh connection. Refused; the socket is then closed."""
    end = time.monotonic() + HANDSHAKE_S  # in all: one that sends a byte now and then holds no place for long
    try:
        sock.settimeout(HANDSHAKE_S)
        mine = secrets.token_bytes(_NONCE)
        sock.sendall(_HELLO + mine)
        theirs = _read(sock, _NONCE, end)
        if not hmac.compare_digest(_read(sock, _MAC, end), _mac(key, b"node", mine, theirs)):
            sock.sendall(_NO)
            raise Refused("it holds another key")
        sock.sendall(_YES + _mac(key, b"head", mine, theirs))
        return _ready(sock)
    except (Gone, OSError) as error:
        sock.close()
        raise Refused(f"it did not prove that it holds the key: {error}") from error
    except BaseException:
        sock.close()
        raise


class Lines:
    """JSON, a line each way, over a proven connection. One thread may receive while others send."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._buffer = b""
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)

    def send(self, **line: object) -> None:
        """Gone."""
        try:
            with self._sending:
                self._socket.sendall(json.dumps(line).encode() + b"\n")
        except OSError as error:
            raise Gone(str(error)) from error

    def receive(self, wait_s: float) -> Line | None:
        """The next line, None when none comes in time. Gone."""
        end = time.monotonic() + wait_s
        try:
            while b"\n" not in self._buffer:
                if not self._poll.poll(max(0.0, end - time.monotonic()) * 1000):
                    return None
                data = self._socket.recv(65536)
                if not data or len(self._buffer) > _LONGEST_LINE:
                    raise Gone("the other side has closed the connection")
                self._buffer += data
        except OSError as error:
            raise Gone(str(error)) from error
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            found: Line = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Gone(f"the other side does not speak JSON: {error}") from error
        if not isinstance(found, dict):
            raise Gone("the other side does not speak in objects")
        return found

    def release(self) -> socket.socket:
        """The socket, for another use: nothing more may be sent or received here. Gone: the other side did not wait."""
        if self._buffer:
            raise Gone("the other side spoke out of turn")
        self._socket.settimeout(None)
        return self._socket

    def close(self) -> None:
        """Again: nothing happens."""
        self._socket.close()


def _mac(key: bytes, role: bytes, head: bytes, node: bytes) -> bytes:
    return hmac.digest(key, role + head + node, "sha256")


def _read(sock: socket.socket, length: int, end: float) -> bytes:
    data = b""
    while len(data) < length:
        sock.settimeout(max(0.001, end - time.monotonic()))
        found = sock.recv(length - len(data))
        if not found:
            raise Gone("the connection was closed")
        data += found
    return data


def _ready(sock: socket.socket) -> socket.socket:
    sock.settimeout(HANDSHAKE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock
