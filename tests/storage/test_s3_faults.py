"""A real server behind a proxy that spoils its answers: what is tried again, what is refused, and in which words."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from botocore.retries import standard
from saggar.storage.base import StorageSettings
from saggar.storage.errors import StorageConfigError, StorageDenied, StorageRefused, StorageUnavailable
from saggar.storage.retry import Backoff
from saggar.storage.s3 import S3Storage

from tests.support.faulty_s3 import Call, Changes, Cuts, Fault, FaultyS3, Says, fine
from tests.support.weed import S3Server

PAGE = b"<html><body>Log in to this network</body></html>"
ERROR = (
    b"<?xml version='1.0' encoding='UTF-8'?><Error><Code>InternalError</Code><Message>again</Message></Error>"
)
MIB = 1 << 20
Store = tuple[S3Storage, FaultyS3]


def short(value: object) -> str:
    """The name of a fault."""
    if isinstance(value, Says):
        return f"{value.status}-{value.code if value.body is None else len(value.body)}"
    return f"cut-{value.where}" if isinstance(value, Cuts) else ""


@pytest.fixture
def faulty(s3_server: S3Server, s3_store: S3Storage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store of a test's own behind the proxy; it has the object `k` and knows that it has conditional PUT."""
    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda *_: 0)
    monkeypatch.setattr(Backoff, "pause_s", lambda *_: 0)
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    prefix = s3_store.url.removeprefix(f"s3://{s3_server.bucket}").lstrip("/")
    with FaultyS3(s3_server) as proxy:
        settings = StorageSettings(
            endpoint=proxy.endpoint_url, path_style=True, attempts=2, multipart_bytes=5 * MIB
        )
        storage = S3Storage(s3_server.bucket, prefix, settings)
        storage.put("k", b"0123456789", content_type="text/plain")
        assert storage.probe()
        yield storage, proxy
        storage.close()


def once(fault: Fault, which: Callable[[Call], bool] = lambda _: True) -> Callable[[Call], Fault | None]:
    left = [fault]
    return lambda call: left.pop() if left and which(call) else None


@pytest.mark.e2e
@pytest.mark.parametrize(
    "fault",
    [
        Says(500, "InternalError"),
        Says(503, "SlowDown"),
        Says(404, body=PAGE),
        Says(200, body=PAGE),
        Says(200, body=b""),
        Says(200, body=ERROR),
        Cuts("request"),
        Cuts("answer"),
    ],
    ids=short,
)
def test_a_put_is_believed_only_when_a_store_has_answered(faulty: Store, fault: Fault) -> None:
    storage, proxy = faulty
    proxy.rule = lambda call: fault if call.method == "PUT" else None
    for put in (storage.put, storage.put_if_absent):
        with pytest.raises(StorageUnavailable):
            put("new", b"x", content_type="text/plain")
        proxy.rule, faulty_rule = fine, proxy.rule
        storage.delete(["new"])
        proxy.rule = faulty_rule
    proxy.rule = once(fault)
    assert storage.put_if_absent("new", b"x", content_type="text/plain"), "it is ours, whoever lost an answer"
    assert storage.get("new") == b"x"


@pytest.mark.e2e
@pytest.mark.parametrize(
    "fault",
    [Says(200, body=PAGE), Says(200, body=ERROR), Says(404, body=PAGE), Cuts("body")],
    ids=short,
)
def test_a_read_is_believed_only_when_a_store_has_answered(faulty: Store, fault: Fault) -> None:
    storage, proxy = faulty
    proxy.rule = lambda _: fault
    with pytest.raises(StorageUnavailable):
        storage.get("k")
    with pytest.raises(StorageUnavailable):
        list(storage.read("k", 3))
    with pytest.raises(StorageUnavailable):
        list(storage.list(""))
    if fault != Says(404, body=PAGE) and fault != Cuts("body"):  # a HEAD has no body that could tell
        with pytest.raises(StorageUnavailable):
            storage.head("k")


@pytest.mark.e2e
def test_bytes_that_were_not_put_are_read_again_and_then_given_to_who_judges_them(faulty: Store) -> None:
    storage, proxy = faulty
    cut = Changes(body=lambda body: body[:4])
    assert storage.put_if_absent("once", b"0123456789", content_type="text/plain")
    for key in ("k", "once"):
        proxy.rule = once(cut)
        assert storage.get(key) == b"0123456789"
        proxy.rule = lambda _: cut
        assert storage.get(key) == b"0123"


@pytest.mark.e2e
def test_a_server_that_knows_no_ranges_is_read_from_there_all_the_same(faulty: Store) -> None:
    storage, proxy = faulty
    whole = {"etag": '"e"', "last-modified": "Mon, 30 Nov 2026 11:00:00 GMT"}
    proxy.rule = lambda _: Says(200, body=b"0123456789", headers=whole)
    assert b"".join(storage.read("k", 7)) == b"789"


@pytest.mark.e2e
def test_what_was_in_the_way_and_is_gone_is_tried_again(faulty: Store) -> None:
    storage, proxy = faulty
    proxy.rule = lambda call: Says(412, "PreconditionFailed") if call.method == "PUT" else None
    with pytest.raises(StorageUnavailable):
        storage.put_if_absent("new", b"x", content_type="text/plain")
    proxy.rule = once(Says(412, "PreconditionFailed"))
    assert storage.put_if_absent("new", b"x", content_type="text/plain")


def completes(call: Call) -> bool:
    return call.method == "POST" and "uploadId" in call.query


@pytest.mark.e2e
@pytest.mark.parametrize(
    "rule",
    [
        once(Cuts("answer"), completes),
        once(Says(404, "NoSuchUpload"), completes),
        once(Says(200, body=ERROR), completes),
        once(Says(404, "NoSuchUpload"), lambda call: "partNumber" in call.query),
        once(Changes(headers={"etag": None}), lambda call: "partNumber" in call.query),
        once(Says(200, body=PAGE), lambda call: call.query == "uploads"),
    ],
    ids=["answer lost", "completed", "error in 200", "part lost", "part without etag", "page"],
)
def test_an_upload_in_parts_that_is_lost_on_the_way_begins_anew(
    faulty: Store, rule: Callable[[Call], Fault | None], tmp_path: Path
) -> None:
    storage, proxy = faulty
    path = tmp_path / "large"
    path.write_bytes(os.urandom(6 * MIB))
    proxy.rule = rule
    storage.put("large", path, content_type="video/mp4")
    assert storage.get("large") == path.read_bytes()


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        (Says(400, "ExpiredToken"), "ExpiredToken.*; its session token has expired: give this process new"),
        (Says(403, "RequestTimeTooSkewed"), "RequestTimeTooSkewed.*; set this machine's clock"),
        (Says(403, "InvalidAccessKeyId"), "InvalidAccessKeyId.*; check the access key and the secret key"),
    ],
    ids=short,
)
def test_who_is_denied_is_told_why(faulty: Store, refusal: Says, says: str) -> None:
    storage, proxy = faulty
    proxy.rule = lambda _: refusal
    with pytest.raises(StorageDenied, match=says):
        storage.put("new", b"x", content_type="text/plain")


def creates(call: Call) -> bool:
    return any(name.lower() == "if-none-match" for name in call.headers)


@pytest.mark.e2e
def test_a_token_that_expires_amid_the_probe_says_nothing_of_conditional_put(faulty: Store) -> None:
    storage, proxy = faulty
    proxy.rule = lambda call: Says(400, "ExpiredToken") if creates(call) else None
    with pytest.raises(StorageDenied):
        storage.probe()
    proxy.rule = lambda call: Says(501, "NotImplemented") if creates(call) else None
    assert not storage.probe()
    proxy.rule = fine
    assert storage.probe()
    assert list(storage.list("_probe")) == []


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        (
            Says(403, "AccessDenied", "two\nlines"),
            "AccessDenied.*two lines; the credentials lack a permission",
        ),
        (
            Says(403, "SignatureDoesNotMatch"),
            "SignatureDoesNotMatch.*; check the access key and the secret key, and whether a gateway changes",
        ),
        (Says(403, body=PAGE), "new: HTTP status 403; the credentials lack"),
        (
            Says(307, "TemporaryRedirect"),
            "new: the store sends the request elsewhere: set SAGGAR_S3_ENDPOINT",
        ),
        (
            Says(301, "PermanentRedirect"),
            "new: the store sends the request elsewhere: set SAGGAR_S3_ENDPOINT",
        ),
    ],
    ids=short,
)
def test_a_refusal_says_what_to_do(faulty: Store, refusal: Says, says: str) -> None:
    storage, proxy = faulty
    proxy.rule = lambda _: refusal
    with pytest.raises(StorageRefused, match=says) as caught:
        storage.put("new", b"x", content_type="text/plain")
    assert not isinstance(caught.value, StorageDenied)
    assert "\n" not in str(caught.value)


def test_an_endpoint_with_a_password_is_refused_without_it() -> None:
    for name in ("endpoint", "public_endpoint"):
        settings = StorageSettings(**{name: "http://someone:hushhush@localhost:1"})
        with pytest.raises(StorageConfigError, match="holds no user and no password") as caught:
            S3Storage("bucket", "", settings)
        assert "hush" not in str(caught.value)
