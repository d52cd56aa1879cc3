"""Shards as they are written and read: formats, sizes, numbers, determinism, refusals."""

from __future__ import annotations

import glob
import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from saggar.storage.base import Storage
from saggar.storage.errors import Conflict, NotFound, StorageConfigError, StorageUnavailable
from saggar.storage.local import LocalStorage
from saggar.storage.s3 import S3Storage
from saggar.storage.samples import Sample, SampleSpool
from saggar.storage.shard_formats import FORMATS
from saggar.storage.shard_index import ShardKeys, index_numbers, read_indexes, read_total
from saggar.storage.shards import ShardWriter

from tests.support.samples import HookedStorage, png, sample, samples
from tests.support.weed import S3Server

FORMAT_NAMES = sorted(FORMATS)
KEYS = ShardKeys("set")


def pack(storage: Storage, rows: list[Sample], kind: str = "webdataset", **options) -> ShardWriter:
    with ShardWriter(storage, "set", kind, target_count=options.pop("count", 4), **options) as writer:
        for row in rows:
            writer.add(row)
        writer.finish()
    return writer


def objects(storage: Storage) -> dict[str, str]:
    return {info.key: hashlib.sha256(storage.get(info.key)).hexdigest() for info in storage.list("set/")}


def read_back(storage: Storage, kind: str) -> list[Sample]:
    return [
        row
        for index in read_indexes(storage, "set")
        for row in FORMATS[kind].read(io.BytesIO(storage.get(f"set/data/{index.name}")))
    ]


@pytest.mark.parametrize("kind", FORMAT_NAMES)
def test_what_is_packed_is_read_back(store: Storage, kind: str) -> None:
    rows = samples(10)
    pack(store, rows, kind)
    extension = FORMATS[kind].extension
    assert sorted(objects(store)) == [
        "set/_SUCCESS",
        *(f"set/data/0000{number}.{extension}" for number in range(3)),
        "set/index.json",
        *(f"set/index/0000{number}.json" for number in range(3)),
    ]
    back = read_back(store, kind)
    assert [row.key for row in back] == [row.key for row in rows]
    assert [dict(row.files) for row in back] == [dict(row.files) for row in rows]
    assert [row.caption for row in back] == [row.caption for row in rows]
    assert all(row.metadata == {**row.metadata, **was.metadata} for row, was in zip(back, rows, strict=True))
    assert [row.metadata["sha256"] for row in back] == [
        hashlib.sha256(row.files["png"]).hexdigest() for row in rows
    ]
    total = read_total(store, KEYS)
    assert (total.rows, [line.rows for line in total.shards]) == (10, [4, 4, 2])
    mark = store.get("set/_SUCCESS").decode().split()
    assert mark == [hashlib.sha256(store.get("set/index.json")).hexdigest(), "index.json"]


def test_webdataset_reads_them(local_store: LocalStorage) -> None:
    import webdataset

    pack(local_store, samples(10))
    folder = local_store._root / "set" / "data"
    read = list(
        webdataset.WebDataset(f"{folder}/{{00000..00002}}.tar", shardshuffle=False, empty_check=False).decode(
            "rgb8"
        )
    )
    assert [row["__key__"] for row in read] == [f"row-{number:04d}" for number in range(10)]
    assert read[9]["png"].shape == (8, 12, 3) and read[9]["png"][0, 0, 0] == 9
    assert read[3]["txt"] == sample(3).caption
    assert read[3]["json"]["parameters"] == {"steps": 4}


@pytest.mark.parametrize("kind", FORMAT_NAMES)
def test_datasets_reads_them(
    local_store: LocalStorage, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    pack(local_store, samples(10), kind)
    folder = str(local_store._root / "set" / "data")
    for what in (
        {"path": folder},
        {"path": kind, "data_files": sorted(glob.glob(f"{folder}/*"))},
    ):
        read = datasets.load_dataset(**what, split="train", cache_dir=str(tmp_path / "cache"))
        assert len(read) == 10
        row = read[9]
        picture = row["image" if kind == "parquet" else "png"]
        assert picture.size == (12, 8) and picture.getpixel((0, 0)) == (9, 0, 7)
        assert row["caption" if kind == "parquet" else "txt"] == sample(9).caption


def test_pyarrow_reads_columns(local_store: LocalStorage) -> None:
    from pyarrow import parquet

    rows = samples(5)
    rows[4] = Sample("linked", {}, "elsewhere", {"uri": "s3://b/k.png", "sha256": "ab" * 32, "seed": 2**62})
    pack(local_store, rows, "parquet")
    table = parquet.read_table(local_store._root / "set" / "data")
    assert table.column("key").to_pylist() == [row.key for row in rows]
    assert table.column("seed").to_pylist() == [0, 1, 2, 3, 2**62]
    assert table.column("numerics").to_pylist() == ["exact"] * 4 + [None]
    assert table.column("uri").to_pylist() == [None] * 4 + ["s3://b/k.png"]
    assert table.column("sha256").to_pylist()[4] == "ab" * 32
    assert json.loads(table.column("parameters")[0].as_py()) == {"steps": 4}
    image = table.column("image").to_pylist()
    assert image[0] == {"bytes": png(0), "path": "row-0000.png"} and image[4] is None


@pytest.mark.e2e
def test_pyarrow_and_webdataset_read_them_in_s3(s3_store: S3Storage, s3_server: S3Server) -> None:
    import webdataset
    from pyarrow import fs, parquet

    pack(s3_store, samples(10), "parquet")
    filesystem = fs.S3FileSystem(
        access_key=s3_server.access_key,
        secret_key=s3_server.secret_key,
        endpoint_override=s3_server.endpoint_url.removeprefix("http://"),
        scheme="http",
        region=s3_server.region,
    )
    where = s3_store.uri("set/data").removeprefix("s3://")
    table = parquet.read_table(where, filesystem=filesystem, columns=["key", "seed"])
    assert table.column("seed").to_pylist() == list(range(10))
    s3_store.delete(info.key for info in s3_store.list("set/"))
    pack(s3_store, samples(10))
    urls = [f"pipe:curl -sfL '{s3_store.presign(f'set/data/0000{number}.tar')}'" for number in range(3)]
    read = list(webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8"))
    assert [row["__key__"] for row in read] == [f"row-{number:04d}" for number in range(10)]


@pytest.mark.parametrize("kind", FORMAT_NAMES)
def test_further_files_of_a_sample_go_along(local_store: LocalStorage, kind: str) -> None:
    target = io.BytesIO()
    np.save(target, np.arange(4, dtype=np.float16))
    rows = [Sample("r", {"png": png(1), "latent.npy": target.getvalue()}), Sample("s", {"wav": b"RIFF"})]
    pack(local_store, rows, kind)
    assert [dict(row.files) for row in read_back(local_store, kind)] == [dict(row.files) for row in rows]


@pytest.mark.parametrize("kind", FORMAT_NAMES)
def test_equal_samples_are_equal_bytes(tmp_path: Path, kind: str) -> None:
    made = []
    for name in ("one", "two"):
        storage = LocalStorage(tmp_path / name)
        pack(storage, samples(9), kind)
        made.append(objects(storage))
    assert made[0] == made[1]


@pytest.mark.parametrize("kind", FORMAT_NAMES)
def test_a_row_is_packed_once_whoever_comes_again(local_store: LocalStorage, kind: str) -> None:
    rows = samples(6)
    pack(local_store, rows[:5] + rows[:2], kind)
    before = objects(local_store)
    writer = ShardWriter(local_store, "set", kind, target_count=4)
    assert writer.packed == {row.key for row in rows[:5]}
    assert [writer.add(row) for row in [*rows, rows[5]]] == [False] * 5 + [True, False]
    writer.finish()
    assert {key: value for key, value in before.items() if "/data/" in key or "/index/" in key}.items() <= (
        objects(local_store).items()
    )
    assert [len(index.rows) for index in read_indexes(local_store, "set")] == [4, 1, 1]
    assert read_total(local_store, KEYS).rows == 6


def test_a_set_that_grows_is_not_finished(local_store: LocalStorage) -> None:
    pack(local_store, samples(4))
    writer = ShardWriter(local_store, "set", target_count=1)
    assert local_store.head("set/_SUCCESS") is not None, "to look is no change"
    writer.add(sample(7))
    assert local_store.head("set/_SUCCESS") is None
    writer.finish()
    assert local_store.head("set/_SUCCESS") is not None


def test_a_shard_is_closed_by_the_sample_that_reaches_the_target(local_store: LocalStorage) -> None:
    rows = [Sample(f"r{number}", {"png": b"x" * 1000}) for number in range(10)]
    pack(local_store, rows, count=None, target_bytes=2500)
    assert [len(index.rows) for index in read_indexes(local_store, "set")] == [3, 3, 3, 1]


def test_nothing_packed_is_a_finished_set(local_store: LocalStorage) -> None:
    pack(local_store, [])
    assert read_total(local_store, KEYS).shards == ()
    assert index_numbers(local_store, KEYS) == []


def test_the_spool_keeps_no_sample_in_memory(tmp_path: Path) -> None:
    with SampleSpool(tmp_path) as spool:
        for row in samples(5):
            spool.append(row)
        assert list(tmp_path.iterdir()) == [], "a file without a name ends with its process"
        weight = spool.bytes
        spool.drop(["row-0001", "unknown"])
        assert 0 < spool.bytes < weight
        assert list(spool) == [row for row in samples(5) if row.key != "row-0001"]
        spool.drop([row.key for row in samples(5)])
        assert (len(spool), spool.bytes, list(spool)) == (0, 0, [])


BAD = {
    "dot": Sample("a.b", {"png": b"x"}),
    "empty key": Sample("", {"png": b"x"}),
    "slash": Sample("../x", {"png": b"x"}),
    "long key": Sample("k" * 81, {"png": b"x"}),
    "extension": Sample("k", {"../png": b"x"}),
    "reserved": Sample("k", {"json": b"{}"}),
    "nan": Sample("k", {"png": b"x"}, metadata={"score": float("nan")}),
    "surrogate": Sample("k", {"png": b"x"}, "\ud800"),
    "hash": Sample("k", {"png": b"x"}, metadata={"sha256": "00" * 32}),
    "no file": Sample("k", {}),
}


@pytest.mark.parametrize("kind", FORMAT_NAMES)
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_sample_is_refused_by_its_key_and_spoils_nothing(
    local_store: LocalStorage, kind: str, bad: str
) -> None:
    writer = ShardWriter(local_store, "set", kind)
    writer.add(sample(1))
    with pytest.raises(ValueError):
        writer.add(BAD[bad])
    assert writer.finish().rows == 1


def test_parquet_has_typed_columns(local_store: LocalStorage) -> None:
    writer = ShardWriter(local_store, "set", "parquet")
    for metadata in ({"seed": "7"}, {"width": True}, {"model": 3}):
        with pytest.raises(ValueError, match="k: "):
            writer.add(Sample("k", {"png": b"x"}, metadata=metadata))


def test_wrong_settings_are_told_at_start(local_store: LocalStorage) -> None:
    for options in ({"target_bytes": 0}, {"target_bytes": 5 << 30}, {"target_count": 0}):
        with pytest.raises(StorageConfigError, match="target"):
            ShardWriter(local_store, "set", **options)
    with pytest.raises(StorageConfigError, match="webdataset, parquet"):
        ShardWriter(local_store, "set", "zip")
    pack(local_store, samples(1))
    with pytest.raises(Conflict, match="webdataset shards, not parquet"):
        ShardWriter(local_store, "set", "parquet")


def test_a_hole_is_a_conflict_and_a_lost_index_is_made_again(local_store: LocalStorage) -> None:
    pack(local_store, samples(12))
    before = objects(local_store)
    local_store.delete(["set/index/00001.json"])
    ShardWriter(local_store, "set")
    assert objects(local_store) == before
    local_store.delete(["set/index/00001.json", "set/data/00001.tar"])
    with pytest.raises(Conflict, match=r"00001\.tar is gone"):
        ShardWriter(local_store, "set")


def test_a_shard_that_is_none_is_a_conflict(local_store: LocalStorage) -> None:
    local_store.put("set/data/00000.tar", b"not a tar", content_type="application/x-tar")
    with pytest.raises(Conflict, match="not a shard"):
        ShardWriter(local_store, "set")


def test_an_outage_costs_nothing(local_store: LocalStorage) -> None:
    away = [True]

    def before(number: int, name: str) -> None:
        if name == "put_if_absent" and away[0]:
            raise StorageUnavailable("away")

    writer = ShardWriter(HookedStorage(local_store, before), "set", target_count=2)
    rows = samples(3)
    writer.add(rows[0])
    for row in rows[1:]:
        with pytest.raises(StorageUnavailable):
            writer.add(row)
    away[0] = False
    assert [writer.add(row) for row in rows] == [False, False, True]
    assert [len(index.rows) for index in writer.shards] == [2]
    assert writer.finish().rows == 3


def test_a_store_without_conditional_put_takes_a_sole_writer(tmp_path: Path) -> None:
    class Plain(LocalStorage):
        @property
        def conditional_put(self) -> bool:
            return False

        def put_if_absent(self, key, data, *, content_type) -> bool:
            raise AssertionError("it has none")

    storage = Plain(tmp_path)
    with pytest.raises(StorageConfigError, match="sole writer"):
        ShardWriter(storage, "set")
    pack(storage, samples(5), sole_writer=True)
    pack(storage, samples(9), sole_writer=True)
    assert [len(index.rows) for index in read_indexes(storage, "set")] == [4, 1, 4]


def test_unfinished_has_no_total(local_store: LocalStorage) -> None:
    with pytest.raises(NotFound):
        read_total(local_store, KEYS)
