"""Manifests: rows become jobs with ids and seeds of their content, or errors with their line, whatever the format."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from saggar.storage.local import LocalStorage
from saggar.workers.runs.manifest import Manifest
from saggar.workers.runs.readers import Columns

from tests.jobs.samples import CARD, MODEL
from tests.support.inputs import image
from tests.workers.manifests import PARAMS, card_of, expansion, jobs, read, rows


def test_rows_become_jobs_in_order_with_defaults_below_their_own(tmp_path: Path) -> None:
    found = read(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b", "params": {"height": 32}})
    assert [job.prompt for job in found] == ["a", "b"]
    assert (found[1].params["height"], found[1].params["steps"]) == (32, 5)
    assert {job.run for job in found} == {"r"}
    assert found[0].params["width"] == 256, "complete: the card's defaults are in the plan"


def test_a_text_file_holds_a_prompt_a_line(tmp_path: Path) -> None:
    assert [job.prompt for job in read(tmp_path / "a.txt", "one", "", "two  ")] == ["one", "two"]


def test_id_and_seed_come_from_content_and_run_alone(tmp_path: Path) -> None:
    first = read(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b"})
    again = read(tmp_path / "b.jsonl", {"prompt": "b"}, {"prompt": "a"})
    assert {(job.prompt, job.id, job.seed) for job in first} == {
        (job.prompt, job.id, job.seed) for job in again
    }
    assert read(tmp_path / "a.jsonl", {"prompt": "a"}, how=expansion("other"))[0].id != first[0].id
    assert read(tmp_path / "a.jsonl", {"prompt": "a", "params": {"steps": 6}})[0].id != first[0].id
    said = read(tmp_path / "a.jsonl", {"prompt": "a", "params": {"steps": 5}})[0]
    assert said.id == first[0].id, "what a flag or the card says is the same as what the row says"


@pytest.mark.parametrize("change", [{"revision": "v2"}, {"numerics": "other"}])
def test_another_build_of_the_model_is_another_row(
    tmp_path: Path, manifest: Manifest, change: dict[str, str]
) -> None:
    first = read(tmp_path / "a.jsonl", {"prompt": "a"})
    card = CARD.model_copy(update=change)
    manifest.read(tmp_path / "a.jsonl", expansion(), Columns(), lambda _: card)
    assert jobs(manifest)[0].id != first[0].id
    assert jobs(manifest)[0].seed == first[0].seed


def test_a_name_of_its_own_stands_in_front_of_the_id(tmp_path: Path) -> None:
    job = read(tmp_path / "a.jsonl", {"prompt": "a", "id": "cat-001", "seed": 0})[0]
    assert job.id.startswith("cat-001-")
    assert job.seed == 0


def test_equal_rows_are_one_job(tmp_path: Path, manifest: Manifest) -> None:
    rows(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "a"}, {"prompt": "a", "seed": 1})
    manifest.read(tmp_path / "a.jsonl", expansion(), Columns(), card_of)
    assert (manifest.planned, manifest.folded, manifest.rows) == (2, 1, 3)


def test_seeds_and_a_matrix_multiply_rows(tmp_path: Path) -> None:
    how = expansion(seeds="0..2,7", matrix=["guidance=3,5", "sampler=euler,heun"])
    found = read(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b"}, how=how)
    assert len(found) == len({job.id for job in found}) == 2 * 4 * 4
    assert {job.seed for job in found} == {0, 1, 2, 7}
    assert {(job.params["guidance"], job.params["sampler"]) for job in found} == {
        (3, "euler"), (3, "heun"), (5, "euler"), (5, "heun"),
    }  # fmt: skip
    assert how.seed_stride == 8


def test_a_matrix_of_models_asks_each_ones_card(tmp_path: Path) -> None:
    other = CARD.model_copy(update={"model": "other"})
    cards = {MODEL: CARD, "other": other}
    how = expansion(matrix=[f"model={MODEL},other"])
    assert how.models == (MODEL, "other")
    with Manifest() as manifest:
        manifest.read(
            rows(tmp_path / "a.jsonl", {"prompt": "a"}), how, Columns(), lambda job: cards[job.model]
        )
        assert [job.model for job in jobs(manifest)] == [MODEL, "other"]


TABLE = {
    "caption": ["a", 'b, "c"\nd'],
    "width": [64, 128],
    "seed": [1, 2],
    "score": [0.5, 0.7],
    "tags": ["x", "y"],
}


def test_csv_parquet_and_folders_of_datasets_say_the_same(tmp_path: Path) -> None:
    table = pa.table(TABLE)
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "folder").mkdir()
    pq.write_table(table, tmp_path / "folder" / "train.parquet")
    (tmp_path / "a.csv").write_text(
        'caption,width,seed,score,tags\na,64,1,0.5,x\n"b, ""c""\nd",128,2,0.7,y\n', encoding="utf-8-sig"
    )
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps({**record, "tags": [record["tags"]]}) for record in table.to_pylist())
    )
    columns = {"caption": "prompt"}
    ids = []
    for name in ("a.csv", "a.jsonl"):
        found = read(tmp_path / name, columns=columns)
        ids.append([job.id for job in found])
        assert [(job.prompt, job.params["width"], job.seed, job.tags) for job in found] == [
            ("a", 64, 1, ["x"]), ('b, "c"\nd', 128, 2, ["y"]),
        ]  # fmt: skip
    assert ids[0] == ids[1]
    columns["tags"] = "params.label"
    parquet = read(tmp_path / "a.parquet", columns=columns)
    assert [job.params["label"] for job in parquet] == ["x", "y"]
    assert [job.id for job in read(tmp_path / "folder", columns=columns)] == [job.id for job in parquet]


def test_columns_that_mean_nothing_are_told(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / "a.csv").write_text("prompt,score,url\na,1,\nb,2,\n")
    columns = Columns({}, PARAMS)
    manifest.read(tmp_path / "a.csv", expansion(), columns, card_of)
    assert list(columns.unused) == ["score", "url"]
    assert manifest.bad == 0


def test_pictures_lie_beside_the_manifest(tmp_path: Path) -> None:
    card = CARD.model_copy(update={"inputs": ["image"]})
    (tmp_path / "a.csv").write_text("prompt,image,task\na,img/1.png,i2i\nb,s3://b/2.png,i2i\n")
    with Manifest() as manifest:
        manifest.read(tmp_path / "a.csv", expansion(), Columns({}, PARAMS), lambda _: card)
        assert [job.inputs.image for job in jobs(manifest)] == [
            ((tmp_path / "img/1.png").as_uri(),), ("s3://b/2.png",),
        ]  # fmt: skip


def test_local_files_get_the_uris_that_an_upload_will_give_them(tmp_path: Path) -> None:
    card = CARD.model_copy(update={"inputs": ["image", "mask"]})
    store = LocalStorage(tmp_path / "store")
    (tmp_path / "img").mkdir()
    for name, colour in (("1.png", (1, 2, 3)), ("2.png", (1, 2, 3)), ("3.png", (4, 5, 6))):
        (tmp_path / "img" / name).write_bytes(image(color=colour))
    path = rows(
        tmp_path / "a.jsonl",
        {"prompt": "a", "task": "i2i", "inputs": {"image": ["img/1.png"], "mask": ["img/3.png"]}},
        {"prompt": "b", "task": "i2i", "inputs": {"image": ["img/2.png"]}},
        {"prompt": "c", "task": "i2i", "inputs": {"image": ["s3://b/k.png"]}},
    )
    with Manifest() as manifest:
        manifest.read(path, expansion(), Columns({}, PARAMS), lambda _: card, lambda: store)
        assert manifest.complaint() == ""
        first, second, third = jobs(manifest)
        assert list(store.list("")) == [], "nothing is sent before all rows are good"
        assert manifest.upload() == 3
    assert first.inputs.image == second.inputs.image != first.inputs.mask
    assert third.inputs.image == ("s3://b/k.png",)
    assert [store.uri(info.key) for info in store.list("uploads/")] == sorted(
        [*first.inputs.image, *first.inputs.mask]
    )


@pytest.mark.parametrize("name", ["none.png", "../secret", "page.html", "."])
def test_what_is_no_picture_is_not_sent_away(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("root:x:0:0")
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "page.html").write_text("<!doctype html>")
    card = CARD.model_copy(update={"inputs": ["image"]})
    (folder / "a.csv").write_text(f"prompt,image,task\na,{name},i2i\n")
    with Manifest() as manifest:
        manifest.read(
            folder / "a.csv",
            expansion(),
            Columns({}, PARAMS),
            lambda _: card,
            lambda: LocalStorage(tmp_path / "s"),
        )
        assert "line 2: inputs.image: " in manifest.complaint()
        assert "(allowed: files that are there: pictures, videos, sounds)" in manifest.complaint()
        assert manifest.upload() == 0


def test_what_is_new_beside_an_older_plan(tmp_path: Path, manifest: Manifest) -> None:
    old = read(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b"})
    rows(tmp_path / "a.jsonl", {"prompt": "b"}, {"prompt": "c"})
    manifest.read(tmp_path / "a.jsonl", expansion(), Columns(), card_of)
    more, digest = manifest.only_new(job.id for job in old)
    assert more == 1
    assert [job.prompt for job in jobs(manifest)] == ["c"]
    with Manifest() as whole:
        rows(tmp_path / "b.jsonl", {"prompt": "c"}, {"prompt": "a"}, {"prompt": "b"})
        whole.read(tmp_path / "b.jsonl", expansion(), Columns(), card_of)
        assert whole.digest == digest
