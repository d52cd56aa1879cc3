"""A run's contact sheet: from any store, each opened once, and one kind of error."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import fakeredis
import numpy as np
import pytest
import redis
from PIL import Image
from saggar.jobs.client import JobClient
from saggar.jobs.ledger import Ledger
from saggar.storage.local import LocalStorage
from saggar.workers.runs import outputs
from saggar.workers.runs.sheet import SheetFailed, write_sheet

from tests.jobs.samples import SETTINGS, make_job, make_result, submit


@pytest.fixture
def redis_client() -> Iterator[redis.Redis]:
    with fakeredis.FakeRedis(decode_responses=True) as client:
        yield client


def succeed(client: redis.Redis, job_id: str, uri: str) -> None:
    ledger, result = Ledger(client, SETTINGS), make_result(1)
    submit(ledger, make_job(id=job_id, run="r"))
    ledger.start(job_id, "worker")
    outputs = [result.outputs[0].model_copy(update={"uri": uri})]
    assert ledger.commit(job_id, 1, result.model_copy(update={"outputs": outputs}))


def picture() -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.full((64, 64, 3), 200, np.uint8)).save(data, "PNG")
    return data.getvalue()


class Buckets:
    """`open_storage` of buckets that are folders; remembers what was opened and closed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: list[str] = []
        self.closed: list[str] = []

    def store(self, root: str) -> LocalStorage:
        return LocalStorage(self.folder / root.removeprefix("s3://"))

    def open(self, root: str) -> LocalStorage:
        self.opened.append(root)
        store = self.store(root)
        store.close = lambda: self.closed.append(root)  # type: ignore[method-assign]
        return store


@pytest.fixture
def buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Buckets:
    buckets = Buckets(tmp_path / "buckets")
    monkeypatch.setattr(outputs, "open_storage", buckets.open)
    return buckets


def test_a_store_is_opened_once_a_run(redis_client: redis.Redis, buckets: Buckets, tmp_path: Path) -> None:
    for number in range(6):
        root, key = f"s3://b{number % 2}", f"out/j{number}/a1/0-01234567.png"
        buckets.store(root).put(key, picture(), content_type="image/png")
        succeed(redis_client, f"j{number}", f"{root}/{key}")
    (tmp_path / "a b.png").write_bytes(picture())
    succeed(redis_client, "local", (tmp_path / "a b.png").as_uri())
    path = write_sheet(JobClient(SETTINGS, redis_client), "r", tmp_path / "new" / "sheet.png")
    with Image.open(path) as made:
        assert made.width > made.height > 128, "seven tiles in a row"
    assert sorted(buckets.opened) == sorted(buckets.closed) == ["s3://b0", "s3://b1"]


def test_whatever_goes_wrong_is_one_error(
    redis_client: redis.Redis, buckets: Buckets, tmp_path: Path
) -> None:
    client, path = JobClient(SETTINGS, redis_client), tmp_path / "sheet.png"
    with pytest.raises(SheetFailed, match=r"sheet\.png could not be made: ValueError: 0 pictures"):
        write_sheet(client, "r", path)
    succeed(redis_client, "j", "s3://b/out/j/a1/0-01234567.png")
    with pytest.raises(SheetFailed, match="NotFound"):
        write_sheet(client, "r", path)
    buckets.store("s3://b").put("out/j/a1/0-01234567.png", b"no picture", content_type="image/png")
    with pytest.raises(SheetFailed, match="UnidentifiedImageError"):
        write_sheet(client, "r", path)
    assert buckets.opened == buckets.closed
    buckets.store("s3://b").put("out/j/a1/0-01234567.png", picture(), content_type="image/png")
    path.mkdir()
    with pytest.raises(SheetFailed, match="IsADirectoryError"):
        write_sheet(client, "r", path)
