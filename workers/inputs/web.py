"""A file over https: to a checked address, within a time, never more bytes than are allowed.

Redirects are followed by hand, each to a place and an address that are checked anew. Nothing is decompressed, no
cookie, no credential and no proxy is used.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO
from urllib.parse import urljoin

from saggar.storage.retry import Backoff
from saggar.workers.inputs.addresses import Resolve, allowed_address, resolve
from saggar.workers.inputs.bad import BadInput
from saggar.workers.inputs.policy import HTTPS_PORT, Limits, Place, Policy

MOST_REDIRECTS = 5
TRIES = 3
_STALL_S = 10.0
_PIECE = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_PASSING = (408, 425, 429)
_OVER = "it took too long, or is not wanted any more"


class WebUnavailable(Exception):
    """The host does not answer, or says that it may later."""


class Cut:
    """What ends a fetch from another thread: the socket that it waits on is shut."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.over = threading.Event()

    def cancel(self) -> None:
        """Ends the fetch under way and every later one."""
        with self._lock:
            self.over.set()
            self._shut()

    def use(self, sock: socket.socket | None) -> None:
        """The socket to shut; at once if the fetch is over."""
        with self._lock:
            self._socket = sock
            if self.over.is_set():
                self._shut()

    def _shut(self) -> None:
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:  # not connected yet or no longer: then nobody waits on it
                return


class _Connection(http.client.HTTPSConnection):
    """To an address that was checked; TLS speaks with the host's name."""

    def __init__(self, place: Place, address: str, context: ssl.SSLContext, cut: Cut) -> None:
        super().__init__(place.host, place.port, timeout=_STALL_S, context=context)
        self._address, self._tls, self._cut = address, context, cut

    def connect(self) -> None:
        plain = socket.create_connection((self._address, self.port), _STALL_S)
        try:
            # Its hello is waited for as a TLS socket: wrapping takes the plain one's place.
            sock = self._tls.wrap_socket(
                plain,
                server_hostname=self.host,
                do_handshake_on_connect=False,
                suppress_ragged_eofs=False,  # a connection that broke is no end of a file
            )
        except BaseException:
            plain.close()
            raise
        self.sock = sock
        self._cut.use(sock)
        sock.do_handshake()

    def close(self) -> None:
        self._cut.use(None)
        super().close()


class Web:
    """Fetches what the policy allows; threads share it. Certificates are checked against the system's authorities."""

    def __init__(self, policy: Policy, limits: Limits, resolver: Resolve = resolve) -> None:
        self._policy, self._limits, self._resolve = policy, limits, resolver
        self._tls = ssl.create_default_context()

    def fetch(self, place: Place, target: IO[bytes], cut: Cut) -> None:
        """Writes the file to `target`. `cut.cancel` ends it; so does the time, which is for all tries together.

        Raises BadInput, and WebUnavailable when it was cut or the host does not give it.
        """
        late = threading.Timer(self._limits.timeout_s, cut.cancel)
        late.daemon = True
        late.start()
        try:
            for failures in range(1, TRIES + 1):
                try:
                    return self._try(place, target, cut)
                except WebUnavailable:
                    if failures == TRIES or cut.over.wait(Backoff().pause_s(failures)):
                        raise
        finally:
            late.cancel()

    def _try(self, place: Place, target: IO[bytes], cut: Cut) -> None:
        target.seek(0)
        target.truncate()
        try:
            self._follow(place, target, cut)
        except ssl.SSLCertVerificationError as error:
            why = f"the host's certificate is not valid: {error.verify_message}"
            raise BadInput(why, "hosts with a certificate that this machine trusts") from error
        except (OSError, http.client.HTTPException) as error:
            raise WebUnavailable(f"{type(error).__name__} from {place.host[:100]}") from error
        except BadInput:
            if not cut.over.is_set():
                raise
        if cut.over.is_set():  # headers and files that were cut look as if they had ended
            raise WebUnavailable(_OVER)

    def _follow(self, place: Place, target: IO[bytes], cut: Cut) -> None:
        for _ in range(MOST_REDIRECTS + 1):
            with self._get(place, cut) as answer:
                if answer.status not in _REDIRECTS:
                    self._take(place, answer, target)
                    return
                place = self._next(place, answer.headers.get("Location"))
        raise BadInput("is redirected too often", f"at most {MOST_REDIRECTS} redirects")

    def _next(self, place: Place, location: str | None) -> Place:
        if not location:
            raise BadInput("is redirected to nowhere", self._policy.allowed)
        target = f"?{place.query}" if place.query else ""
        here = f"https://{_netloc(place)}{place.path}{target}"
        try:
            found, _ = self._policy.find(urljoin(here, location))
        except BadInput as error:
            raise BadInput(f"a redirect {error.message}", error.allowed) from error
        except ValueError as error:  # of urljoin
            raise BadInput("a redirect is not a URI that can be read", self._policy.allowed) from error
        if found.scheme != "https":
            raise BadInput("a redirect leaves https", self._policy.allowed)
        return found

    @contextmanager
    def _get(self, place: Place, cut: Cut) -> Iterator[http.client.HTTPResponse]:
        if cut.over.is_set():
            raise WebUnavailable(_OVER)
        private = place.host in self._policy.private_hosts
        address = allowed_address(place.host, self._resolve(place.host, place.port), private=private)
        connection = _Connection(place, address, self._tls, cut)
        try:
            target = place.path + (f"?{place.query}" if place.query else "")
            headers = {"Host": _netloc(place), "Accept-Encoding": "identity", "User-Agent": "saggar"}
            connection.request("GET", target, headers=headers)
            yield connection.getresponse()
        finally:
            connection.close()

    def _take(self, place: Place, answer: http.client.HTTPResponse, target: IO[bytes]) -> None:
        if answer.status >= 500 or answer.status in _PASSING:
            raise WebUnavailable(f"{place.host} answers {answer.status}")
        if answer.status != 200:
            raise BadInput(f"the host answers {answer.status}", "a file that anybody may read")
        if _is_encoded(answer):
            raise BadInput("comes compressed", "files as they are, without Content-Encoding")
        limit = self._limits.bytes
        if (answer.length or 0) > limit:
            raise too_large(limit)
        got = 0
        while piece := answer.read1(_PIECE):
            got += len(piece)
            if got > limit:
                raise too_large(limit)
            target.write(piece)
        if answer.length:  # what is left of the Content-Length
            raise WebUnavailable(f"{place.host} ended {answer.length} bytes early")


def too_large(limit: int) -> BadInput:
    """The error for a file of too many bytes."""
    return BadInput("has too many bytes", f"at most {limit} bytes")


def _is_encoded(answer: http.client.HTTPResponse) -> bool:
    found = [
        *answer.headers.get_all("Content-Encoding", []),
        *answer.headers.get_all("Transfer-Encoding", []),
    ]
    return bool(
        {coding.strip().lower() for coding in ",".join(found).split(",")} - {"", "identity", "chunked"}
    )


def _netloc(place: Place) -> str:
    host = f"[{place.host}]" if ":" in place.host else place.host
    return host if place.port == HTTPS_PORT else f"{host}:{place.port}"
