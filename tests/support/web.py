"""A small https server of a test's own, on loopback, with the habits that a worker meets outside.

`certificate/` was made for these tests alone and is trusted by nobody who does not name it (SSL_CERT_FILE).
"""

from __future__ import annotations

import ssl
import sys
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

CERTIFICATE = Path(__file__).parent / "certificate"
TRUST = str(CERTIFICATE / "cert.pem")
Answer = Callable[["Handler"], None]


class WebServer:
    """`with WebServer() as web`: `web.files` are served by path; `web.habits` answer themselves. `asked` counts."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.habits: dict[str, Answer] = {
            "/endless": endless,
            "/claims": claims,
            "/short": short,
            "/silent": silent,
            "/packed": packed,
            "/packed-twice": packed_twice,
            "/packed-pieces": packed_pieces,
            "/half": half,
            "/broken-off": broken_off,
            "/dripping": dripping,
            "/broken": lambda handler: handler.say(503),
            "/secret": lambda handler: handler.say(403),
            "/loop": lambda handler: handler.redirect("/loop"),
            "/nowhere": lambda handler: handler.say(302),
        }
        self.asked: Counter[str] = Counter()
        self.over = threading.Event()
        web = self

        class Bound(Handler):
            server_of = web

        self._server = _Server(("127.0.0.1", 0), Bound)
        self._server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE / "cert.pem", CERTIFICATE / "key.pem")
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def port(self) -> int:
        return self._server.server_port

    def url(self, path: str, host: str = "localhost") -> str:
        return f"https://{host}:{self.port}{path}"

    def redirect(self, path: str, target: str) -> None:
        """`path` leads to `target` from now on."""
        self.habits[path] = lambda handler: handler.redirect(target)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    """A client that hangs up in the middle of a greeting or an answer is what some tests are about."""

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server_of: WebServer

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server_of.asked[path] += 1
        try:
            if path in self.server_of.habits:
                self.server_of.habits[path](self)
            elif path in self.server_of.files:
                self.say(200, self.server_of.files[path])
            else:
                self.say(404)
        except OSError:
            return  # the worker has hung up, as it should

    def say(self, status: int, data: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", headers.pop("length", str(len(data))))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def redirect(self, target: str) -> None:
        self.say(302, Location=target)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


def endless(handler: Handler) -> None:
    """Bytes without end and without a Content-Length."""
    handler.send_response(200)
    handler.end_headers()
    while not handler.server_of.over.is_set():
        handler.wfile.write(bytes(1 << 16))


def claims(handler: Handler) -> None:
    """A Content-Length of a terabyte, then nothing."""
    handler.say(200, b"", length=str(10**12))
    handler.server_of.over.wait()


def short(handler: Handler) -> None:
    """Less than was announced."""
    handler.say(200, bytes(10), length="1000")
    handler.close_connection = True


def silent(handler: Handler) -> None:
    """Nothing at all, for ever."""
    handler.server_of.over.wait()


def packed(handler: Handler) -> None:
    """Compressed, whatever was asked for."""
    handler.say(200, b"\x1f\x8b" + bytes(20), Content_Encoding="gzip")


def packed_twice(handler: Handler) -> None:
    """Compressed, behind a header that says it is not."""
    handler.send_response(200)
    handler.send_header("Content-Encoding", "identity")
    handler.send_header("Content-Encoding", "gzip")
    handler.end_headers()
    handler.wfile.write(b"\x1f\x8b" + bytes(20))


def packed_pieces(handler: Handler) -> None:
    """Compressed for the way."""
    handler.say(200, b"\x1f\x8b" + bytes(20), Transfer_Encoding="gzip, chunked")


def half(handler: Handler) -> None:
    """Half of a file of unknown length, then nothing."""
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b"half")
    handler.server_of.over.wait()


def broken_off(handler: Handler) -> None:
    """Half of a file of unknown length, then a connection that is gone without TLS's goodbye."""
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b"half")
    handler.close_connection = True


def dripping(handler: Handler) -> None:
    """A beginning of headers, then nothing."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-A: b\r\n")
    handler.server_of.over.wait()
