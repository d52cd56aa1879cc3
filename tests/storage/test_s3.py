"""S3 in particular: which answers are worth another try, no conditional PUT, multipart, a killed server."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from botocore.exceptions import EndpointConnectionError
from botocore.retries import standard
from saggar.storage.base import StorageSettings
from saggar.storage.errors import NotFound, StorageConfigError, StorageRefused, StorageUnavailable
from saggar.storage.make_bucket import main, make_ready
from saggar.storage.retry import Backoff
from saggar.storage.s3 import S3Storage

from tests.support.weed import S3Server

Answer = Callable[[str, str, bool], int]
"""(method, path, does it ask to create only) → status"""


class ScriptedS3:
    """An HTTP server that answers with the status that `answer` says, and counts by method."""

    def __init__(self, answer: Answer) -> None:
        self.requests: Counter[str] = Counter()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.requests[self.command] += 1
                status = answer(self.command, self.path, self.headers.get("If-None-Match") == "*")
                body = b"" if self.command == "HEAD" or status < 300 else b"<Error><Code>Said</Code></Error>"
                self.send_response(status)
                self.send_header("ETag", '"e"')
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> ScriptedS3:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda *_: 0)
    monkeypatch.setattr(Backoff, "pause_s", lambda *_: 0)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], tuple[ScriptedS3, S3Storage]]]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    opened: list[ScriptedS3] = []

    def start(answer: Answer) -> tuple[ScriptedS3, S3Storage]:
        opened.append(ScriptedS3(answer).__enter__())
        settings = StorageSettings(endpoint=opened[-1].url, path_style=True, attempts=2)
        return opened[-1], S3Storage("bucket", "", settings)

    yield start
    for server in opened:
        server.__exit__()


@pytest.mark.parametrize("status", [500, 502, 503, 504, 408, 429])
def test_passing_answers_are_tried_again(scripted, status: int) -> None:
    server, storage = scripted(lambda *_: status)
    with pytest.raises(StorageUnavailable):
        storage.put("k", b"x", content_type="text/plain")
    assert server.requests["PUT"] >= 2


@pytest.mark.parametrize("status", [400, 401, 403, 405, 411, 501])
def test_other_refusals_are_final(scripted, status: int) -> None:
    server, storage = scripted(lambda *_: status)
    with pytest.raises(StorageRefused) as caught:
        storage.get("k")
    assert caught.value.status == status
    assert server.requests["GET"] == 1


def test_a_store_that_recovers_is_no_failure(scripted) -> None:
    answers = iter([503, 500, 429, 200])
    server, storage = scripted(lambda *_: next(answers))
    storage.put("k", b"x", content_type="text/plain")
    assert server.requests["PUT"] == 4


def test_a_closed_port_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    with ScriptedS3(lambda *_: 200) as gone:
        pass
    storage = S3Storage("bucket", "", StorageSettings(endpoint=gone.url, path_style=True, attempts=2))
    with pytest.raises(StorageUnavailable):
        storage.get("k")


def test_no_credentials_are_final(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    storage = S3Storage("bucket", "", StorageSettings(endpoint="http://127.0.0.1:1", path_style=True))
    with pytest.raises(StorageRefused, match="credentials"):
        storage.get("k")


@pytest.mark.parametrize("status", [200, 400, 501])
def test_a_store_without_conditional_put_is_found_out(scripted, status: int) -> None:
    """It ignores the header, or refuses it."""
    _, storage = scripted(lambda method, path, create: status if create else 200)
    assert storage.conditional_put is False
    with pytest.raises(StorageRefused, match="conditional"):
        storage.put_if_absent("k", b"x", content_type="text/plain")


def test_the_probe_does_not_hide_a_store_that_refuses(scripted) -> None:
    _, storage = scripted(lambda *_: 403)
    with pytest.raises(StorageRefused):
        storage.probe()


@pytest.mark.parametrize("metadata", [{"prompt": "naïve"}, {"a": "line\nbreak"}, {"ü": "x"}])
def test_metadata_is_printable_ascii(scripted, metadata: dict[str, str]) -> None:
    server, storage = scripted(lambda *_: 200)
    with pytest.raises(StorageRefused, match="ASCII"):
        storage.put("k", b"", content_type="text/plain", metadata=metadata)
    assert not server.requests


def test_a_wrong_endpoint_is_told_at_once() -> None:
    with pytest.raises(StorageConfigError):
        S3Storage("bucket", "", StorageSettings(endpoint="no url"))


@pytest.mark.parametrize("expires_s", [0, -1, 8 * 24 * 3600])
def test_presigned_urls_have_limits(scripted, expires_s: int) -> None:
    _, storage = scripted(lambda *_: 200)
    with pytest.raises(StorageConfigError):
        storage.presign("k", expires_s)


def test_presigned_urls_use_signature_v4_and_the_public_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    settings = StorageSettings(
        endpoint="http://inside:8333", public_endpoint="https://s3.example", path_style=True
    )
    url = S3Storage("bucket", "p", settings).presign("a/b.png", 60)
    assert re.match(r"https://s3\.example/bucket/p/a/b\.png\?.*X-Amz-Algorithm=AWS4-HMAC-SHA256", url)


@pytest.mark.e2e
def test_large_files_go_in_parts_and_are_whole(
    s3_store: S3Storage, s3_server: S3Server, tmp_path: Path
) -> None:
    settings = StorageSettings.from_env().model_copy(update={"multipart_bytes": 5 << 20})
    storage = S3Storage(s3_server.bucket, "parts", settings)
    path = tmp_path / "video"
    path.write_bytes(os.urandom(1 << 20) * 20)
    info = storage.put("video.mp4", path, content_type="video/mp4")
    assert re.fullmatch(r"[0-9a-f]+-\d+", info.etag), "the mark of an upload in parts"
    assert storage.get("video.mp4") == path.read_bytes()
    found = storage.head("video.mp4")
    assert found is not None
    assert (found.sha256, found.content_type) == (info.sha256, "video/mp4")


@pytest.mark.e2e
def test_unfinished_uploads_are_abandoned_only_when_old(s3_store: S3Storage, s3_server: S3Server) -> None:
    client = s3_server.client()
    name = s3_store.uri("left").split("/", 3)[3]
    client.create_multipart_upload(Bucket=s3_server.bucket, Key=name)
    beside = f"{s3_store.url.split('/', 3)[3]}-beside/left"
    client.create_multipart_upload(Bucket=s3_server.bucket, Key=beside)
    now = datetime.now(UTC)
    assert s3_store.abandon_uploads(now - timedelta(hours=1)) == 0
    assert s3_store.abandon_uploads(now + timedelta(hours=1)) == 1, "those of other prefixes are not ours"
    assert s3_store.abandon_uploads(now + timedelta(hours=1)) == 0


@pytest.mark.e2e
def test_an_object_whose_answer_was_lost_is_known_as_ours(
    s3_store: S3Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert s3_store.probe()
    client = s3_store._client
    real, calls = client.put_object, []

    def lossy(**arguments: object) -> object:
        calls.append(real(**arguments))
        if len(calls) == 1:
            raise EndpointConnectionError(endpoint_url="the answer was lost")
        return calls[-1]

    monkeypatch.setattr(client, "put_object", lossy)
    assert s3_store.put_if_absent("result.json", b"mine", content_type="application/json") is True
    monkeypatch.setattr(client, "put_object", real)
    assert s3_store.put_if_absent("result.json", b"mine", content_type="application/json") is False


@pytest.mark.e2e
def test_wrong_keys_are_refused_once_and_for_all(
    s3_server: S3Server, s3_store: S3Storage, monkeypatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    storage = S3Storage(s3_server.bucket, "", StorageSettings.from_env())
    with pytest.raises(StorageRefused) as caught:
        storage.put("k", b"x", content_type="text/plain")
    assert caught.value.status == 403


@pytest.mark.e2e
def test_what_was_acknowledged_survives_a_killed_server(s3_server: S3Server, s3_store: S3Storage) -> None:
    keys = [f"kept/{number}" for number in range(20)]
    for key in keys:
        s3_store.put(key, key.encode(), content_type="text/plain")
    assert s3_store.put_if_absent("kept/result.json", b"{}", content_type="application/json")
    s3_server.kill()
    try:
        with pytest.raises(StorageUnavailable):
            s3_store.get(keys[0])
    finally:
        s3_server.start()
    for key in keys:
        assert s3_store.get(key) == key.encode()
    assert not s3_store.put_if_absent("kept/result.json", b"other", content_type="application/json")
    with pytest.raises(NotFound):
        s3_store.get("kept/none")


@pytest.mark.e2e
def test_a_bucket_that_is_not_there_is_not_made_by_looking(s3_server: S3Server, s3_store: S3Storage) -> None:
    storage = S3Storage(f"mistyped-{os.getpid()}", "", StorageSettings.from_env())
    with pytest.raises(StorageConfigError, match="there is no such bucket; make it, or correct the name"):
        storage.probe()
    assert f"mistyped-{os.getpid()}" not in [
        bucket["Name"] for bucket in s3_server.client().list_buckets()["Buckets"]
    ]


def test_whoever_may_not_look_for_the_bucket_may_still_put(scripted) -> None:
    server, storage = scripted(lambda verb, *_: 403 if verb == "HEAD" else 200)
    assert not storage.probe()
    assert server.requests["PUT"] == 2


@pytest.mark.e2e
def test_a_bucket_is_made_once_and_ready_twice(
    s3_server: S3Server, s3_store: S3Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"fresh-{os.getpid()}"
    assert main([f"s3://{name}/results"]) == 0
    assert main([f"s3://{name}/results"]) == 0
    assert f"s3://{name}/results is ready, with conditional PUT" in capsys.readouterr().out
    assert name in [bucket["Name"] for bucket in s3_server.client().list_buckets()["Buckets"]]


def test_a_bucket_of_another_region_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    storage, asked = S3Storage("bucket", "", StorageSettings(region="eu-north-1")), []
    monkeypatch.setattr(storage._client, "create_bucket", lambda **arguments: asked.append(arguments))
    storage.make_bucket()
    where = {"LocationConstraint": "eu-north-1"}
    assert asked == [{"Bucket": "bucket", "CreateBucketConfiguration": where}]


def test_a_store_that_stays_away_is_told(scripted, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    _, storage = scripted(lambda *_: 503)
    with pytest.raises(StorageUnavailable):
        make_ready(storage, timeout_s=0)
    monkeypatch.setenv("SAGGAR_STORE", "nonsense://x")
    assert main([]) == 1
    assert "nonsense" in capsys.readouterr().err
