"""What every store promises, run against the local folder and a real S3 server."""

from __future__ import annotations

import hashlib
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Barrier

import pytest
from saggar.storage.base import Storage, key_of, open_storage
from saggar.storage.errors import Conflict, InvalidKey, NotFound

from tests.storage.test_keys import BAD_KEYS


def test_what_is_put_is_got(store: Storage) -> None:
    data = bytes(range(256)) * 10
    info = store.put("job/a1/0-x.png", data, content_type="image/png", metadata={"seed": "1"})
    assert (info.key, info.size, info.sha256) == ("job/a1/0-x.png", 2560, hashlib.sha256(data).hexdigest())
    assert store.get("job/a1/0-x.png") == data
    found = store.head("job/a1/0-x.png")
    assert found is not None
    assert (found.key, found.size, found.content_type) == ("job/a1/0-x.png", 2560, "image/png")
    assert found.etag == info.etag
    assert abs(found.modified - datetime.now(UTC)) < timedelta(minutes=5)


def test_an_object_is_read_in_pieces_from_any_byte(store: Storage) -> None:
    data = bytes(range(256)) * 12_000
    info = store.put("large", data, content_type="application/octet-stream")
    assert b"".join(store.read("large")) == data
    assert b"".join(store.read("large", 3_000_000, info.etag)) == data[3_000_000:]
    assert max(map(len, store.read("large"))) < len(data)
    with pytest.raises(NotFound):
        next(store.read("no/such"))


def test_the_rest_of_a_replaced_object_is_not_read(store: Storage) -> None:
    info = store.put("large", b"first", content_type="text/plain")
    store.put("large", b"other", content_type="text/plain")
    with pytest.raises(Conflict):
        next(store.read("large", 2, info.etag))


def test_a_file_is_put_like_bytes(store: Storage, tmp_path: Path) -> None:
    path = tmp_path / "source"
    path.write_bytes(b"from a file" * 1000)
    info = store.put("file", path, content_type="application/octet-stream")
    assert info.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert store.get("file") == path.read_bytes()


def test_put_replaces(store: Storage) -> None:
    store.put("k", b"one", content_type="text/plain")
    store.put("k", b"", content_type="text/plain")
    assert store.get("k") == b""


def test_what_is_missing(store: Storage) -> None:
    assert store.head("no/such") is None
    with pytest.raises(NotFound):
        store.get("no/such")
    store.delete(["no/such", "nothing"])
    assert list(store.list("")) == []


def test_list_goes_by_text_and_keeps_a_folder_together(store: Storage) -> None:
    keys = ["a-b", "a/b", "a/c/1", "a/c/2", "a/c-d", "a/bb/1", "ab", "b"]
    for key in keys:
        store.put(key, b"x", content_type="text/plain")
    listed = [info.key for info in store.list("")]
    assert sorted(listed) == sorted(keys)
    assert abs(listed.index("a/c/1") - listed.index("a/c/2")) == 1
    assert sorted(info.key for info in store.list("a/b")) == ["a/b", "a/bb/1"]
    assert [(info.key, info.size) for info in store.list("b")] == [("b", 1)]
    assert list(store.list("a/c/1/d")) == []


def test_delete(store: Storage) -> None:
    for number in range(5):
        store.put(f"d/{number}", b"x", content_type="text/plain")
    store.delete(f"d/{number}" for number in range(4))
    assert [info.key for info in store.list("d/")] == ["d/4"]


def test_put_if_absent_creates_once(store: Storage) -> None:
    assert store.probe() is True
    assert store.conditional_put is True
    assert store.put_if_absent("job/result.json", b"first", content_type="application/json") is True
    assert store.put_if_absent("job/result.json", b"second", content_type="application/json") is False
    assert store.put_if_absent("job/result.json", b"first", content_type="application/json") is False
    assert store.get("job/result.json") == b"first"
    assert [info.key for info in store.list("")] == ["job/result.json"], "the probe leaves nothing"


def test_put_if_absent_takes_a_file_and_large_ones_race_too(store: Storage, tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(4)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * (9 << 20))
    assert store.conditional_put
    start = Barrier(len(paths))

    def run(path: Path) -> bool:
        start.wait(30)
        return store.put_if_absent("large", path, content_type="application/x-tar")

    with ThreadPoolExecutor(len(paths)) as pool:
        won = list(pool.map(run, paths))
    assert won.count(True) == 1
    assert store.get("large") == paths[won.index(True)].read_bytes()


def test_twenty_races_have_one_winner_each(store: Storage) -> None:
    races, racers = 20, 4
    assert store.conditional_put
    start = Barrier(races * racers)

    def run(number: int) -> bool:
        start.wait(30)
        data = b"racer %d" % (number % racers)
        return store.put_if_absent(f"race/{number // racers}", data, content_type="text/plain")

    with ThreadPoolExecutor(races * racers) as pool:
        won = list(pool.map(run, range(races * racers)))
    for race in range(races):
        outcome = won[race * racers : (race + 1) * racers]
        assert outcome.count(True) == 1
        assert store.get(f"race/{race}") == b"racer %d" % outcome.index(True)


def test_bad_keys_are_refused_everywhere(store: Storage) -> None:
    calls: list[Callable[[str], object]] = [
        lambda key: store.put(key, b"", content_type="text/plain"),
        lambda key: store.put_if_absent(key, b"", content_type="text/plain"),
        lambda key: store.delete([key]),
        store.get,
        lambda key: next(store.read(key)),
        store.head,
        store.uri,
        store.presign,
        lambda key: store.presign_put(key, content_type="image/png", size=1),
    ]
    for key in BAD_KEYS:
        for call in calls:
            with pytest.raises(InvalidKey):
                call(key)


@pytest.mark.parametrize("key", ["a.png", "runs/cats/a1/0-12ab.png", "a+b=c@d,e~f/g.png"])
def test_a_uri_leads_back_to_its_key(store: Storage, key: str) -> None:
    assert key_of(store, store.uri(key)) == key
    for other in (f"{store.uri(key)}/../x", f"s3://elsewhere/{key}", "file:///etc/passwd", "", store.url):
        with pytest.raises(InvalidKey):
            key_of(store, other)


def test_a_presigned_url_reads_the_object(store: Storage) -> None:
    store.put("shown.png", b"picture", content_type="image/png")
    with urllib.request.urlopen(store.presign("shown.png", 60)) as answer:
        assert answer.read() == b"picture"


def test_uri_names_the_object(store: Storage) -> None:
    assert store.uri("a/b") == f"{store.url}/a/b"


def test_the_url_opens_the_same_store(store: Storage) -> None:
    store.put("k", b"v", content_type="text/plain")
    again = open_storage(store.url)
    assert again.get("k") == b"v"
    again.close()


def test_abandoning_uploads_harms_no_object(store: Storage) -> None:
    store.put("k", b"v", content_type="text/plain")
    assert store.abandon_uploads(datetime.now(UTC) + timedelta(hours=1)) == 0
    assert store.get("k") == b"v"
