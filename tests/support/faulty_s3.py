"""A proxy before an S3 server that does what stores do on bad days: refusals, cut lines, lost answers, odd ones."""

from __future__ import annotations

import http.client
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Self
from urllib.parse import urlsplit

from tests.support.weed import S3Server


@dataclass(frozen=True)
class Call:
    """What was asked: `key` is the part of the path behind the bucket, `query` what follows."""

    method: str
    key: str
    query: str
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Says:
    """Answers by itself: the server behind does not hear of it."""

    status: int
    code: str = "Said"
    message: str = "as told"
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cuts:
    """Resets the connection: amid the request's body, after the server has done what was asked (its answer is
    lost), or amid the answer's body, whose length it told.
    """

    where: str  # "request", "answer", "body"


@dataclass(frozen=True)
class Changes:
    """The answer, with other headers (None: without it) and another body."""

    headers: Mapping[str, str | None] = field(default_factory=dict)
    body: Callable[[bytes], bytes] | None = None


Fault = Says | Cuts | Changes
Rule = Callable[[Call], Fault | None]
"""None: this call goes through. It may block for as long as the server is to be slow."""


def fine(_: Call) -> None:
    return None


class FaultyS3:
    """Stands where a Site or a test has an S3Server. `rule` may be replaced at any time; `calls` is all that came."""

    def __init__(self, server: S3Server, rule: Rule = fine) -> None:
        self.server = server
        self.rule = rule
        self.calls: list[Call] = []
        self.over = Event()
        self._http = _Quiet(self)
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self.endpoint_url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    @property
    def bucket(self) -> str:
        return self.server.bucket

    @property
    def env(self) -> dict[str, str]:
        return self.server.env | {"SAGGAR_S3_ENDPOINT": self.endpoint_url}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._http.shutdown()
        self._http.server_close()


class _Quiet(ThreadingHTTPServer):
    """Clients that go away are nothing to tell of."""

    def __init__(self, proxy: FaultyS3) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client; `proxy` is whose rule it follows."""

    protocol_version = "HTTP/1.1"
    server: _Quiet

    def answer(self) -> None:
        path, _, query = self.path.partition("?")
        call = Call(self.command, path.lstrip("/").partition("/")[2], query, dict(self.headers))
        proxy = self.server.proxy
        proxy.calls.append(call)
        fault = proxy.rule(call)
        size = int(self.headers.get("Content-Length", 0))
        if fault == Cuts("request"):
            self.rfile.read(size // 2)
            self._reset()
            return
        body = self.rfile.read(size)
        if isinstance(fault, Says):
            self._say(fault)
        else:
            self._pass_on(body, fault)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

    def _pass_on(self, body: bytes, fault: Cuts | Changes | None) -> None:
        """What the server answers, as the fault leaves it."""
        status, headers, found = self._forward(body)
        if fault == Cuts("answer"):
            self._reset()
            return
        if isinstance(fault, Changes):
            headers = {**{name.lower(): value for name, value in headers.items()}, **fault.headers}
            if fault.body is not None:
                found = fault.body(found)
                headers["content-length"] = str(len(found))
        self._send(status, {name: value for name, value in headers.items() if value is not None}, b"")
        if fault == Cuts("body"):
            self.wfile.write(found[: len(found) // 2])
            self.wfile.flush()
            self._reset()
            return
        self.wfile.write(found)

    def _forward(self, body: bytes) -> tuple[int, dict[str, str | None], bytes]:
        netloc = urlsplit(self.server.proxy.server.endpoint_url).netloc
        there = http.client.HTTPConnection(netloc, timeout=60)
        try:
            there.request(self.command, self.path, body, _without(self.headers, "expect", "connection"))
            answer = there.getresponse()
            data = answer.read()
            kept: dict[str, str | None] = {**_without(answer.headers, "transfer-encoding", "connection")}
            if self.command != "HEAD":
                kept = {name: value for name, value in kept.items() if name.lower() != "content-length"}
                kept["content-length"] = str(len(data))
            return answer.status, kept, data
        except OSError:
            return 502, {"content-length": "0"}, b""
        finally:
            there.close()

    def _say(self, fault: Says) -> None:
        text = (
            f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>{fault.message}</Message></Error>"
        )
        body = text.encode() if fault.body is None else fault.body
        if self.command == "HEAD":
            body = b""
        self._send(fault.status, {"content-length": str(len(body)), **fault.headers}, body)

    def _send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def log_message(self, format: str, *args: object) -> None: ...


def _without(headers: Message, *names: str) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in names}
