"""From where a worker fetches, and how much: places by their URL, limits by their numbers. Pure.

A source is a URL that ends where the allowed part begins: `s3://bucket`, `s3://bucket/folder`, `file:///folder`,
`https://host`, `https://host:8443/folder`, `https://*.example.com`. What is not under one of them is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self
from urllib.parse import unquote, urlsplit

from saggar.storage.uploads import UPLOADS
from saggar.workers.inputs.bad import BadInput

HTTPS_PORT = 443

_HOST = re.compile(
    r"(?=.{1,253}$)(\*\.)?[a-z0-9-]{1,63}(\.[a-z0-9-]{1,63})*|\[[0-9a-f:.]+\]|[0-9a-f:]+", re.ASCII
)
_LAYERS = 8
"""Of percent-encoding, at most: more is refused."""
_SOURCES_ALLOWED = "s3://bucket/folder, file:///folder or https://host/folder"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a file is: `scheme` s3, file or https; `host` a bucket or a host in lower case; `port` of https alone;
    `path` begins with a slash. For https it is still percent-encoded, and `query` follows it."""

    scheme: str
    host: str
    port: int
    path: str
    query: str = ""

    @property
    def decoded(self) -> str:
        """The path without percent-encoding."""
        return unquote(self.path) if self.scheme == "https" else self.path


@dataclass(frozen=True, slots=True)
class Source:
    """A part of the world that is allowed; `path` is decoded and ends with a slash."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """ValueError for what is no source."""
        place = _split(text)
        if place is None or place.query:
            raise ValueError(f"{text[:100]!r} is no source of input files (allowed: {_SOURCES_ALLOWED})")
        return cls(place.scheme, place.host, place.port, place.decoded.rstrip("/") + "/")

    def holds(self, place: Place) -> bool:
        """Whether the place is within."""
        if (self.scheme, self.port) != (place.scheme, place.port):
            return False
        return self._is_host(place.host) and place.decoded.startswith(self.path)

    def _is_host(self, host: str) -> bool:
        if self.host.startswith("*."):
            return host.endswith(self.host[1:]) and len(host) > len(self.host) - 1
        return host == self.host

    def __str__(self) -> str:
        port = f":{self.port}" if self.port not in (0, HTTPS_PORT) else ""
        return f"{self.scheme}://{self.host}{port}{self.path}"


@dataclass(frozen=True)
class Policy:
    """`private_hosts`: hosts of https sources whose address may be one of a private network or of this machine."""

    sources: tuple[Source, ...]
    private_hosts: frozenset[str] = frozenset()

    @classmethod
    def make(cls, store_url: str, sources: Iterable[str] = (), private_hosts: Iterable[str] = ()) -> Self:
        """The uploads of the worker's own store, and what is named beside them. ValueError."""
        own = f"{store_url.rstrip('/')}/{UPLOADS}/"
        named = tuple(Source.parse(text) for text in (own, *sources))
        return cls(named, frozenset(host.lower() for host in private_hosts))

    def find(self, uri: str) -> tuple[Place, Source]:
        """The file's place and the source that allows it. Raises BadInput."""
        place = _split(uri)
        if place is None or not place.path.strip("/"):
            raise BadInput("is not a URI that can be read", self.allowed)
        for source in self.sources:
            if source.holds(place):
                return place, source
        shown = f"{place.scheme}://{place.host}" if place.host else f"{place.scheme}://"
        raise BadInput(f"lies outside of what this worker may read ({shown[:100]})", self.allowed)

    @property
    def allowed(self) -> str:
        """In words."""
        return ", ".join(map(str, self.sources))


@dataclass(frozen=True)
class Limits:
    """Of one file: `bytes` as fetched, `pixels` of a picture or a frame, `frames` and `seconds` of a video or sound,
    `timeout_s` for a fetch as a whole, `decode_s` for what follows. `memory` in bytes: of all decoded inputs that a
    worker holds."""

    bytes: int = 256 << 20
    pixels: int = 64 << 20
    frames: int = 1024
    seconds: float = 120.0
    timeout_s: float = 60.0
    decode_s: float = 120.0
    memory: int = 4 << 30


def _split(uri: str) -> Place | None:
    """A URI's parts, None for one of another form: other schemes, users, fragments, `..`, NULs, backslashes."""
    scheme, separator, rest = uri.partition("://")
    if not separator or not rest.isascii() or not rest.isprintable() or set(rest) & set("\\# "):
        return None
    if scheme == "https":
        return _split_web(uri)
    host, slash, tail = rest.partition("/")
    path = slash + (unquote(tail) if scheme == "file" else tail)
    fits = bool(host) if scheme == "s3" else scheme == "file" and not host and bool(slash)
    if not fits or not _is_plain(path or "/"):
        return None
    return Place(scheme, host, 0, path or "/")


def _split_web(uri: str) -> Place | None:
    try:
        parts = urlsplit(uri)
        host, port = (parts.hostname or "").lower().rstrip("."), parts.port or HTTPS_PORT
    except ValueError:
        return None
    if "@" in parts.netloc or not _HOST.fullmatch(host) or not _is_plain_web(parts.path):
        return None
    return Place("https", host, port, parts.path or "/", parts.query)


def _is_plain_web(path: str) -> bool:
    """However often whoever stands in front of the host decodes it, and where it cuts parameters off a part."""
    for _ in range(_LAYERS):
        plainer = unquote(path)
        named = "/".join(part.partition(";")[0] for part in plainer.split("/"))
        if not _is_plain(plainer) or not _is_plain(named):
            return False
        if plainer == path:
            return True
        path = plainer
    return False


def _is_plain(path: str) -> bool:
    return not {".", ".."} & set(path.split("/")) and not {"\0", "\\"} & set(path)
