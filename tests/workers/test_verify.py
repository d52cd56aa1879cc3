"""Verifying: what is whole is clean, whatever is spoilt is told, and nothing is touched."""

from __future__ import annotations

import io
import json
import shutil
import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from saggar.engine import Engine, EngineConfig
from saggar.jobs.runs import RunSpec
from saggar.jobs.schema import Job
from saggar.storage.base import Storage, open_storage
from saggar.storage.local import LocalStorage
from saggar.storage.shards import ShardWriter
from saggar.workers.cli import cli
from saggar.workers.publish import Origin, Publisher
from saggar.workers.runs.folder import RunFolder
from saggar.workers.runs.regenerate import compare, recorded, remake
from saggar.workers.runs.samples import Recorded, recorded_of, sample_of
from saggar.workers.runs.verify import verify
from saggar.workers.translate import to_request

from tests.support.cluster import noop_model
from tests.support.weed import S3Server


def job(number: int, **fields) -> Job:
    return Job.model_validate(
        {
            "id": f"job-{number}",
            "model": "noop",
            "prompt": f"jar {number}",
            "seed": 10 * number,
            "num_outputs": 2,
            "params": {"width": 24, "height": 16},
            "output": {"format": ("png", "webp", "jpeg")[number % 3], "prefix": "cats"},
            **fields,
        }
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory):
    model = noop_model(tmp_path_factory.mktemp("model") / "noop")
    with Engine.make(EngineConfig(model=str(model), executor="local")) as made:
        yield made


def publish(storage: Storage, engine: Engine, wanted: Job, attempt: int = 1) -> None:
    publisher = Publisher(storage, None, Origin("noop", engine.info.revision, {"saggar": "1"}))
    upload = publisher.upload(wanted, attempt, engine.generate([to_request(wanted)])[0], lambda: True)
    publisher.commit(upload)


def pack(storage: Storage, kind: str) -> None:
    """All pictures of the store into shards, as a run would."""
    with ShardWriter(storage, f"sets/{kind}", kind, target_count=4) as writer:
        for info in list(storage.list("cats/")):
            if info.key.endswith(".json") and not info.key.endswith("result.json"):
                side = json.loads(storage.get(info.key))
                extension = {"png": "png", "webp": "webp", "jpeg": "jpg"}[side["request"]["output"]["format"]]
                picture = storage.get(f"{info.key.removesuffix('json')}{extension}")
                writer.add(sample_of(f"{side['job_id']}-{side['index']}", picture, extension, side))
        writer.finish()


def plan(storage: Storage, name: str, rows: int) -> None:
    """What a finished run keeps beside its output."""
    folder = RunFolder(storage, name)
    spec = RunSpec(name=name, target=storage.url, model="noop", digest="d1", planned=rows)
    folder.write_plan(spec, (job(number).to_json() for number in range(rows)))
    storage.put(f"_runs/{name}/report.html", b"<p>", content_type="text/html")
    folder.succeed(json.dumps({"manifest": "d1", "planned": rows}).encode())


@pytest.fixture(scope="module")
def made(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six jobs of two pictures, packed in both formats, beside objects that are nobody's."""
    root = tmp_path_factory.mktemp("made")
    storage = LocalStorage(root)
    for number in range(6):
        publish(storage, engine, job(number))
    pack(storage, "webdataset")
    pack(storage, "parquet")
    storage.put("cats/report.html", b"<p>", content_type="text/html")
    plan(storage, "cats", 5)
    return root


@pytest.fixture
def store(made: Path, tmp_path: Path) -> LocalStorage:
    shutil.copytree(made, tmp_path / "copy")
    return LocalStorage(tmp_path / "copy")


def told(storage: LocalStorage) -> list[tuple[str, str]]:
    return [(finding.kind, finding.key) for finding in verify(storage).findings]


def test_what_is_whole_is_clean(store: LocalStorage) -> None:
    advanced: list[tuple[int, int]] = []
    report = verify(store, advance=lambda objects, size: advanced.append((objects, size)))
    assert report.clean and report.findings == []
    assert (report.results, report.runs, report.shards, report.rows, report.others) == (6, 1, 6, 24, 1)
    assert report.objects == 6 * 5 + 2 * (3 * 2 + 2) + 4
    assert sum(objects for objects, _ in advanced) == report.objects
    assert report.bytes == sum(size for _, size in advanced) > 0


@pytest.mark.parametrize(
    ("key", "data", "kind", "why"),
    [
        ("PART", b"{}\n", "wrong", "other bytes"),
        ("PART", None, "missing", "5 rows of the plan"),
        ("run.json", None, "missing", "index"),
        ("run.json", b"{", "wrong", "cannot be read"),
        ("_SUCCESS", b"{}", "wrong", "KeyError"),
        ("_SUCCESS", b'{"manifest": "d2", "planned": 5}', "wrong", "another plan"),
        ("manifest/00001.jsonl", b"{}\n", "extra", "run.json does not name it"),
    ],
)
def test_a_spoilt_plan_is_told(
    store: LocalStorage, key: str, data: bytes | None, kind: str, why: str
) -> None:
    if key == "PART":
        key = next(store.list("_runs/cats/manifest/")).key.removeprefix("_runs/cats/")
    if data is None:
        store.delete([f"_runs/cats/{key}"])
    else:
        store.put(f"_runs/cats/{key}", data, content_type="x")
    (found,) = verify(store).findings
    assert (found.key, found.kind) == (f"_runs/cats/{key}", kind)
    assert why in found.why


def test_a_deeper_root_is_clean_too(store: LocalStorage) -> None:
    for prefix, results, shards in (("cats", 6, 0), ("sets", 0, 6), ("sets/parquet", 0, 3)):
        report = verify(LocalStorage(store._root / prefix))
        assert (report.clean, report.results, report.shards) == (True, results, shards), prefix
    shutil.copytree(store._root / "_runs", store._root / "deep" / "_runs")
    report = verify(LocalStorage(store._root / "deep"))
    assert (report.clean, report.runs, report.objects, report.others) == (True, 1, 4, 0)


def key_of(storage: Storage, end: str) -> str:
    return next(info.key for info in storage.list("") if info.key.endswith(end))


@pytest.mark.parametrize("end", [".png", ".webp", ".jpg", "data/00001.tar", "data/00002.parquet"])
@pytest.mark.parametrize("how", ["deleted", "one bit", "cut", "longer"])
def test_a_spoilt_object_is_told(store: LocalStorage, end: str, how: str) -> None:
    key = key_of(store, end)
    data = store.get(key)
    if how == "deleted":
        store.delete([key])
    else:
        other = {
            "one bit": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
            "cut": data[:-1],
            "longer": data + b"x",
        }
        store.put(key, other[how], content_type="image/png")
    assert told(store) == [("missing" if how == "deleted" else "wrong", key)]


def test_sidecars_and_results_count(store: LocalStorage) -> None:
    side = next(info.key for info in store.list("cats/") if info.key.endswith(".json") and "/a1/" in info.key)
    store.put(side, b"{}", content_type="application/json")
    store.put("cats/job-3/result.json", b"{}", content_type="application/json")
    assert told(store) == [("wrong", side), ("wrong", "cats/job-3/result.json")]


def test_a_result_moved_to_another_job_s_folder_is_wrong(store: LocalStorage) -> None:
    store.put("cats/job-3/result.json", store.get("cats/job-4/result.json"), content_type="application/json")
    assert ("wrong", "cats/job-3/result.json") in told(store)


def test_what_nobody_names_is_extra(store: LocalStorage, engine: Engine) -> None:
    loser = job(2)
    upload = Publisher(store, None, Origin("noop", "r", {})).upload(
        loser, 2, engine.generate([replace(to_request(loser), id="again")])[0], lambda: True
    )
    orphans = [file.key for file in upload.manifest.files()]
    store.put("sets/webdataset/data/00000.parquet", b"x", content_type="application/x-tar")
    orphans.append("sets/webdataset/data/00000.parquet")
    store.delete(["cats/job-5/result.json"])
    orphans += [info.key for info in store.list("cats/job-5/")]
    assert told(store) == sorted(("extra", key) for key in orphans)


def test_shards_that_contradict_their_indexes(store: LocalStorage) -> None:
    base = "sets/webdataset"
    index = json.loads(store.get(f"{base}/index/00001.json"))
    index["rows"][0] = "somebody-else"
    store.put(f"{base}/index/00001.json", json.dumps(index).encode(), content_type="application/json")
    store.put("sets/parquet/index/00001.json", b"[]", content_type="application/json")
    found = {key: kind for kind, key in told(store)}
    assert found[f"{base}/data/00001.tar"] == "wrong"
    assert found["sets/parquet/index/00001.json"] == "wrong"
    assert found["sets/parquet/data/00001.parquet"] == "extra"
    assert found["sets/parquet/index.json"] == "wrong"


def test_rows_in_two_shards_are_wrong(store: LocalStorage) -> None:
    for kind, name in (("data", "tar"), ("index", "json")):
        data = store.get(f"sets/webdataset/{kind}/00000.{name}")
        if kind == "index":
            data = data.replace(b"00000", b"00003").replace(b'"number": 0', b'"number": 3')
        store.put(f"sets/webdataset/{kind}/00003.{name}", data, content_type="application/x-tar")
    findings = verify(store).findings
    assert [(one.kind, one.key) for one in findings if "is in 00000.tar too" in one.why] == [
        ("wrong", "sets/webdataset/data/00003.tar")
    ] * 4


@pytest.mark.parametrize(
    ("gone", "kinds"),
    [
        (["index/00001.json"], ["extra", "wrong", "missing"]),
        (["index/00001.json", "data/00001.tar"], ["wrong", "missing"]),
        (["index.json"], ["missing"]),
        (["_SUCCESS"], ["missing"]),
    ],
)
def test_a_hole_and_an_unfinished_set(store: LocalStorage, gone: list[str], kinds: list[str]) -> None:
    store.delete([f"sets/webdataset/{name}" for name in gone])
    assert [kind for kind, _ in told(store)] == kinds


def test_a_row_comes_back_as_the_job_that_made_it(store: LocalStorage) -> None:
    report = verify(store, picks=100)
    assert len(report.picks) == 36 and report.picks == verify(store, picks=100).picks
    assert [pick.rank for pick in verify(store, picks=5).picks] == [pick.rank for pick in report.picks[:5]]
    found = list(recorded(store, report.picks))
    assert all(isinstance(one, Recorded) for one in found), found
    assert {one.job.prompt for one in found if isinstance(one, Recorded)} == {f"jar {n}" for n in range(6)}


def test_samples_made_again_are_the_same(store: LocalStorage, engine: Engine) -> None:
    wanted = [one for one in recorded(store, verify(store, picks=100).picks) if isinstance(one, Recorded)]
    again = list(remake(engine, wanted))
    assert [one.status for one in again] == ["bit-equal"] * 36, again


def test_another_seed_revision_or_class_is_told(store: LocalStorage, engine: Engine) -> None:
    one = next(one for one in recorded(store, verify(store, picks=1).picks) if isinstance(one, Recorded))
    changed = [
        replace(one, seed=one.seed + 1),
        replace(one, numerics="bfloat16/cuda/sdpa"),
        replace(one, revision="other"),
        replace(one, job=one.job.model_copy(update={"params": {"width": 8, "height": 8}})),
        replace(one, job=one.job.model_copy(update={"params": {"width": -8}})),
        replace(one, job=one.job.model_copy(update={"params": {"fail_at": "step"}})),
    ]
    again = list(remake(engine, changed))
    assert [one.status for one in again] == [
        "differs", "incomparable", "incomparable", "differs", "incomparable", "differs",
    ]  # fmt: skip
    assert "bfloat16/cuda/sdpa" in again[1].why and "revision" in again[2].why
    assert "8×8 pixels, not 24×16" in again[3].why
    assert not any(one.good for one in again)
    assert not any(one.job.prompt in remade.why for remade in again)


def test_how_close_is_close_enough() -> None:
    picture = np.random.default_rng(0).integers(40, 200, (32, 32, 3)).astype(np.uint8)
    off = {levels: picture.copy() for levels in (1, 2, 3, 40)}
    for levels, other in off.items():
        other[0, 0, 0] += levels
    for numerics in ("exact", "float32/cpu/sdpa", "bfloat16/cuda/sdpa", "odd"):
        assert compare(numerics, picture, picture) == ("bit-equal", 0, None)
    cases = {
        "exact": "differs differs differs differs",
        "odd": "differs differs differs differs",
        "float32/cpu/sdpa": "within within differs differs",
        "float16/cuda/sdpa": "within within within within",
    }
    for numerics, expected in cases.items():
        found = [compare(numerics, picture, other)[0] for other in off.values()]
        assert found == expected.split(), numerics
    noisy = (picture + np.random.default_rng(1).integers(0, 30, picture.shape)).astype(np.uint8)
    status, levels, psnr = compare("bfloat16/cuda/sdpa", picture, noisy)
    assert status == "differs" and levels == 29 and psnr is not None and psnr < 30
    with pytest.raises(ValueError, match="16×16"):
        compare("exact", picture, picture[:16, :16])


def test_a_sample_without_its_request_cannot_be_made_again() -> None:
    target = io.BytesIO()
    Image.new("RGB", (8, 8)).save(target, "PNG")
    with pytest.raises(ValueError, match="sidecar has no"):
        sample_of("k", target.getvalue(), "png", {"seed": 1})
    with pytest.raises(ValueError, match="no request is recorded"):
        from saggar.storage.samples import Sample

        recorded_of(Sample("k", {"png": target.getvalue()}, metadata={"seed": 1}))


def run(*arguments: str):
    return CliRunner().invoke(cli, ["verify", *arguments])


def test_the_command_says_clean_and_exits_0(store: LocalStorage) -> None:
    result = run(str(store._root))
    assert result.exit_code == 0, result.output
    assert "6 results, 6 shards with 24 rows, 1 run, 50 objects" in result.stdout and "clean" in result.stdout


def test_the_command_shows_a_table_and_exits_1(store: LocalStorage) -> None:
    key = key_of(store, ".png")
    store.delete([key])
    result = run(str(store._root))
    assert result.exit_code == 1
    assert "missing" in result.stdout and "1 missing" in result.stdout
    content = json.loads(run(str(store._root), "--json").stdout)
    assert (content["clean"], content["missing"], content["wrong"]) == (False, 1, 0)
    assert (
        content["findings"] == [{"kind": "missing", "key": key, "why": content["findings"][0]["why"]}]
        and content["regenerated"] == []
    )


def test_the_command_regenerates(store: LocalStorage, tmp_path: Path) -> None:
    model = noop_model(tmp_path / "noop")
    options = ["--model", str(model), "--executor", "local", "--json"]
    result = run(str(store._root), "--regenerate", "5", *options)
    content = json.loads(result.stdout)
    assert result.exit_code == 0, content["regenerated"]
    assert [one["status"] for one in content["regenerated"]] == ["bit-equal"] * 5


def test_a_place_with_nothing_is_an_error_and_stays_as_it_is(tmp_path: Path) -> None:
    for place, said in ((tmp_path / "no", "no such folder"), (tmp_path, "nothing to verify")):
        result = run(str(place))
        assert result.exit_code == 1 and said in str(result.exception)
    assert not (tmp_path / "no").exists()


@pytest.mark.e2e
def test_a_store_in_s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{s3_server.bucket}/verify/{uuid.uuid4().hex}"
    storage = open_storage(url)
    for number in range(3):
        publish(storage, engine, job(number))
    pack(storage, "webdataset")
    result = run(url)
    assert result.exit_code == 0, result.output
    assert "3 results, 2 shards with 6 rows" in result.stdout
    storage.put("sets/webdataset/data/00001.tar", b"other", content_type="application/x-tar")
    storage.delete([key_of(storage, ".webp")])
    result = run(url, "--json")
    content = json.loads(result.stdout)
    assert (result.exit_code, content["missing"], content["wrong"], content["extra"]) == (1, 1, 1, 0)
    storage.close()
