"""Files from hosts, folders and buckets, as good and as hostile as they come."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from saggar.storage.base import open_storage
from saggar.storage.errors import StorageDenied, StorageUnavailable
from saggar.storage.s3_errors import translated
from saggar.workers.inputs.addresses import resolve
from saggar.workers.inputs.bad import BadInput
from saggar.workers.inputs.fetch import Fetcher, Ticket
from saggar.workers.inputs.policy import Limits, Policy
from saggar.workers.inputs.web import TRIES, WebUnavailable

from tests.support.inputs import image
from tests.support.wait import until
from tests.support.web import TRUST, WebServer
from tests.support.weed import S3Server


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setenv("SSL_CERT_FILE", TRUST)
    with WebServer() as server:
        server.files["/a.png"] = image()
        yield server


Fetch = Callable[..., bytes]


@pytest.fixture
def fetch(web: WebServer, tmp_path: Path) -> Fetch:
    """Fetches from `localhost`, which may be private, and what else is allowed; the whole file."""

    def fetch(
        uri: str,
        *sources: str,
        private: tuple[str, ...] = ("localhost",),
        resolver: Callable[[str, int], list[str]] = resolve,
        ticket: Ticket | None = None,
        **limits: Any,
    ) -> bytes:
        (tmp_path / "store").mkdir(exist_ok=True)
        policy = Policy.make(
            (tmp_path / "store").as_uri(), [f"https://localhost:{web.port}", *sources], private
        )
        fetcher = Fetcher(policy, Limits(**{"bytes": 1 << 20, **limits}), resolver=resolver)
        with fetcher.fetch(uri, ticket or Ticket()) as file:
            return file.read()

    return fetch


def test_a_file_over_https(web: WebServer, fetch: Fetch) -> None:
    assert fetch(web.url("/a.png?signature=x")) == image()
    web.redirect("/there", "/a.png")
    assert fetch(web.url("/there")) == image()


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/missing", "the host answers 404"),
        ("/secret", "the host answers 403"),
        ("/endless", "has too many bytes"),
        ("/claims", "has too many bytes"),
        ("/packed", "comes compressed"),
        ("/packed-twice", "comes compressed"),
        ("/packed-pieces", "comes compressed"),
        ("/loop", "is redirected too often"),
        ("/nowhere", "is redirected to nowhere"),
    ],
)
def test_what_a_host_may_not_do(path: str, says: str, web: WebServer, fetch: Fetch) -> None:
    with pytest.raises(BadInput, match=says):
        fetch(web.url(path))
    assert web.asked[path] == (6 if path == "/loop" else 1)


@pytest.mark.parametrize(
    "target",
    [
        "http://localhost/a.png",
        "https://127.0.0.1:{port}/a.png",
        "https://169.254.169.254/latest/meta-data/",
        "https://localhost:1/a.png",
        "https://evil.example/a.png",
        "https://user:secret@localhost:{port}/a.png",
        "file:///etc/passwd",
        "s3://bucket/a.png",
        "//evil.example/a.png",
        "https://[::1",
        "//[/a.png",
        "https://localhost:99999/a.png",
        "https://" + "a" * 64 + ".wide.example/a.png",
    ],
)
def test_a_redirect_leads_nowhere_else(target: str, web: WebServer, fetch: Fetch) -> None:
    web.redirect("/there", target.format(port=web.port))
    with pytest.raises(BadInput, match="a redirect ") as refused:
        fetch(web.url("/there"), "https://*.wide.example")
    assert "secret" not in str(refused.value)
    assert web.asked == {"/there": 1}


def test_a_redirect_to_an_allowed_name_is_checked_by_its_address(web: WebServer, fetch: Fetch) -> None:
    other = f"https://other.example:{web.port}"
    web.redirect("/there", f"{other}/a.png")
    with pytest.raises(BadInput, match=r"the host other\.example has no address that may be connected to"):
        fetch(web.url("/there"), other, resolver=lambda host, port: ["127.0.0.1"])
    found = fetch(
        web.url("/there"),
        other,
        private=("localhost", "other.example"),
        resolver=lambda host, port: ["127.0.0.1"],
    )
    assert found == image()


def test_a_name_is_resolved_once_and_that_address_is_used(web: WebServer, fetch: Fetch) -> None:
    """DNS rebinding: whoever asks a second time is told another address."""
    answers = [["127.0.0.1"], ["127.0.0.2"]]
    cdn = f"https://cdn.example:{web.port}"
    private = ("cdn.example",)
    assert fetch(f"{cdn}/a.png", cdn, private=private, resolver=lambda host, port: answers.pop(0)) == image()
    assert answers == [["127.0.0.2"]]
    with pytest.raises(BadInput, match="has no address"):
        fetch(f"{cdn}/a.png", cdn, resolver=lambda host, port: ["127.0.0.1"])


def test_a_certificate_must_be_the_hosts(
    web: WebServer, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = f"https://wrong.example:{web.port}"
    with pytest.raises(BadInput, match="certificate is not valid"):
        fetch(f"{wrong}/a.png", wrong, private=("wrong.example",), resolver=lambda host, port: ["127.0.0.1"])
    monkeypatch.setenv("SSL_CERT_FILE", os.devnull)
    with pytest.raises(BadInput, match="certificate is not valid"):
        fetch(web.url("/a.png"))


@pytest.mark.parametrize("path", ["/broken", "/short", "/broken-off"])
def test_a_host_that_cannot_is_asked_again_and_then_given_up(path: str, web: WebServer, fetch: Fetch) -> None:
    with pytest.raises(WebUnavailable, match="localhost"):
        fetch(web.url(path))
    assert web.asked[path] == TRIES


def test_a_host_that_recovers_is_forgiven(web: WebServer, fetch: Fetch) -> None:
    def once(handler: Any) -> None:
        del web.habits["/a.png"]
        handler.say(503)

    web.habits["/a.png"] = once
    assert fetch(web.url("/a.png")) == image()


@pytest.mark.parametrize("path", ["/silent", "/half", "/dripping"])
def test_a_silent_host_has_its_time(path: str, web: WebServer, fetch: Fetch) -> None:
    """What was cut then is no file, though nothing says how long it should have been."""
    with pytest.raises(WebUnavailable):
        fetch(web.url(path), timeout_s=1.0)
    assert web.asked[path] == 1


def test_a_port_that_never_says_hello_has_its_time(web: WebServer, fetch: Fetch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"https://localhost:{mute.getsockname()[1]}"
        with pytest.raises(WebUnavailable):
            fetch(f"{url}/a.png", url, timeout_s=0.3)


def test_a_ticket_ends_a_fetch_that_hangs(web: WebServer, fetch: Fetch) -> None:
    ticket = Ticket()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            fetch(web.url("/silent"), ticket=ticket)
        except WebUnavailable as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    until(lambda: web.asked["/silent"])
    ticket.cancel()
    thread.join(20)
    assert failed


# -- folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.png").write_bytes(image())
    (folder / "deep").mkdir()
    (folder / "deep" / "ä b.png").write_bytes(image())
    (tmp_path / "secret.png").write_bytes(image())
    return folder


def test_a_file_of_a_named_folder(folder: Path, fetch: Fetch) -> None:
    assert fetch((folder / "a.png").as_uri(), folder.as_uri()) == image()
    assert fetch((folder / "deep" / "ä b.png").as_uri(), folder.as_uri()) == image()


def test_links_pipes_and_folders_are_no_files(folder: Path, fetch: Fetch) -> None:
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    (folder / "inner.png").symlink_to(folder / "a.png")
    (folder / "up").symlink_to(folder.parent)
    os.mkfifo(folder / "pipe.png")
    (folder / "locked.png").symlink_to("/etc/passwd")
    for name in (
        "link.png",
        "inner.png",
        "up/secret.png",
        "pipe.png",
        "locked.png",
        "deep",
        "none.png",
        "a.png/b",
    ):
        with pytest.raises(BadInput, match=r"is no plain file|cannot be opened|no such file"):
            fetch(f"{folder.as_uri()}/{name}", folder.as_uri())
    with pytest.raises(BadInput, match="lies outside"):
        fetch("file:///etc/passwd", folder.as_uri())
    with pytest.raises(BadInput, match="has too many bytes"):
        fetch((folder / "a.png").as_uri(), folder.as_uri(), bytes=10)


# -- buckets


def test_objects_of_buckets(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    store = open_storage(f"s3://{s3_server.bucket}/inputs")
    store.put("uploads/a.png", image(), content_type="image/png")
    policy = Policy.make(store.url, ["s3://no-such-bucket"])
    fetcher = Fetcher(policy, Limits(bytes=1 << 20))
    with fetcher.fetch(store.uri("uploads/a.png"), Ticket()) as file:
        assert file.read() == image()
    for uri, says in (
        (store.uri("uploads/none.png"), "there is no such object"),
        (store.uri("uploads/a.png") + "%00", "has a key that is not read"),
        (store.uri("result.json"), "lies outside"),
        ("s3://no-such-bucket/a.png", "the store does not give it"),
    ):
        with pytest.raises(BadInput, match=says):
            fetcher.fetch(uri, Ticket())
    with pytest.raises(BadInput, match="has too many bytes"):
        Fetcher(policy, Limits(bytes=10)).fetch(store.uri("uploads/a.png"), Ticket())
    fetcher.close()
    store.close()


class Away:
    """A store that is away a few times and then not."""

    def __init__(self, times: int, error: Exception) -> None:
        self.error = error
        self.times = times

    def read(self, key: str) -> Iterator[bytes]:
        self.times -= 1
        yield b"first half, "
        if self.times >= 0:
            raise self.error
        yield b"second half"


@pytest.mark.parametrize("error", [StorageUnavailable("away"), StorageDenied("the token has expired")])
def test_a_store_that_is_away_is_asked_until_it_is_back_or_nobody_wants_it(error: Exception) -> None:
    """One that refuses this worker, whatever it asks for, is no job's fault either."""
    policy = Policy.make("s3://bucket")
    fetcher = Fetcher(policy, Limits(), open_store=lambda url: Away(3, error))  # type: ignore[arg-type,return-value]
    with fetcher.fetch("s3://bucket/uploads/a", Ticket()) as file:
        assert file.read() == b"first half, second half"
    ticket = Ticket()
    ticket.cancel()
    with pytest.raises(StorageUnavailable):
        Fetcher(policy, Limits(), open_store=lambda url: Away(3, error)).fetch(
            "s3://bucket/uploads/a", ticket
        )  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (StorageDenied("the token has expired"), "refuses this worker: the token has expired"),
        (StorageUnavailable("the line is cut"), "does not answer: the line is cut"),
    ],
)
def test_that_a_store_is_waited_for_is_told_once(
    error: Exception, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    fetcher = Fetcher(Policy.make("s3://bucket"), Limits(), open_store=lambda url: Away(3, error))  # type: ignore[arg-type,return-value]
    with fetcher.fetch("s3://bucket/uploads/a", Ticket()):
        told = [record.getMessage() for record in caplog.records]
    assert told == [f"input files wait, their store {says}"]


def test_a_signature_that_is_refused_is_no_reason_to_wait() -> None:
    """It may be that of one key or bucket, and all threads that fetch would wait for it."""
    answer: Any = {"Error": {"Code": "SignatureDoesNotMatch"}, "ResponseMetadata": {"HTTPStatusCode": 403}}

    class Rewritten:
        def read(self, key: str) -> Iterator[bytes]:
            with translated(key):
                raise ClientError(answer, "GetObject")
            yield b""

    fetcher = Fetcher(Policy.make("s3://bucket"), Limits(), open_store=lambda url: Rewritten())  # type: ignore[arg-type,return-value]
    with pytest.raises(BadInput, match="the store does not give it"):
        fetcher.fetch("s3://bucket/uploads/a", Ticket())
