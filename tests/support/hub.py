"""A Hugging Face hub of a test's own, on loopback: enough of its HTTP interface for `snapshot_download`."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit


class Hub:
    """`with Hub({"org/name": folder}) as hub`: serves folders at `hub.url`; `served` are the files handed out.

    `parts` are name and size of the pieces asked for by range, `ranges` whether such are given.
    `refuse` answers every request for a repository with this header X-Error-Code and status, as the hub does.
    """

    def __init__(self, folders: Mapping[str, Path], refuse: tuple[int, str] | None = None) -> None:
        self.folders = folders
        self.refuse = refuse
        self.ranges = True
        self.served: list[str] = []
        self.parts: list[tuple[str, int]] = []
        self.tokens: set[str | None] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def files(self, name: str) -> list[Path]:
        return sorted(path for path in self.folders[name].rglob("*") if path.is_file())

    def commit(self, name: str) -> str:
        """40 digits that follow from the content."""
        digest = hashlib.sha1()
        for path in self.files(name):
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Answers for one hub; a class for each, for the server makes its objects."""

    hub: Hub

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""

    def _answer(self, body: bool) -> None:
        self.hub.tokens.add(self.headers.get("Authorization"))
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if api else parts[:2])
        rest = parts[4:] if api else parts[2:]
        if self.hub.refuse:
            self._refuse(*self.hub.refuse)
        elif name not in self.hub.folders:
            self._refuse(404, "RepoNotFound")
        elif rest[1] not in ("main", self.hub.commit(name)):
            self._refuse(404, "RevisionNotFound")
        elif api:
            self._json(self._info(name, rest[0]))
        else:
            self._file(name, "/".join(rest[2:]), body)

    def _info(self, name: str, what: str) -> object:
        folder = self.hub.folders[name]
        if what == "revision":
            siblings = [
                {"rfilename": path.relative_to(folder).as_posix(), "size": path.stat().st_size}
                for path in self.hub.files(name)
            ]
            return {"id": name, "sha": self.hub.commit(name), "siblings": siblings}
        return [
            {
                "type": "file",
                "path": path.relative_to(folder).as_posix(),
                "size": path.stat().st_size,
                "oid": _etag(path),
            }
            for path in self.hub.files(name)
        ]

    def _file(self, name: str, file: str, body: bool) -> None:
        path = self.hub.folders[name] / file
        if not path.is_file():
            self._refuse(404, "EntryNotFound")
            return
        data = path.read_bytes()
        wish = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "") if self.hub.ranges else "")
        if wish:
            data = data[int(wish[1]) : int(wish[2]) + 1]
        self.send_response(206 if wish else 200)
        self.send_header("X-Repo-Commit", self.hub.commit(name))
        self.send_header("ETag", f'"{_etag(path)}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            if wish:
                self.hub.parts.append((file, len(data)))
            else:
                self.hub.served.append(file)
            self.wfile.write(data)

    def _json(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
