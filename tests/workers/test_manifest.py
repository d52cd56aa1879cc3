"""Manifests: rows become jobs with ids and seeds of their content, or errors with their line, whatever the format."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from saggar.jobs import Job, ModelCard
from saggar.jobs.errors import ConfigError
from saggar.jobs.runs.plan import Expansion
from saggar.storage.local import LocalStorage
from saggar.workers.runs.launch import Flags, check_flags
from saggar.workers.runs.manifest import Manifest
from saggar.workers.runs.readers import Columns

from tests.jobs.samples import CARD, MODEL
from tests.support.inputs import image

PARAMS = frozenset(CARD.checker.allowed)


def card_of(job: Job) -> ModelCard | None:
    return CARD if job.model == MODEL else None


@pytest.fixture
def manifest() -> Iterator[Manifest]:
    with Manifest() as manifest:
        yield manifest


def expansion(run: str = "r", sets: Sequence[str] = ("steps=5",), **flags: object) -> Expansion:
    return Flags(sets=sets, **flags).expansion(run, MODEL)  # type: ignore[arg-type]


def jobs(manifest: Manifest) -> list[Job]:
    return [Job.model_validate_json(line) for line in manifest.lines()]


def rows(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def read(
    path: Path, *given: object, how: Expansion | None = None, columns: dict[str, str] | None = None
) -> list[Job]:
    """The jobs of a file of these rows, none of them bad."""
    if given:
        rows(path, *given)
    with Manifest() as manifest:
        manifest.read(path, how or expansion(), Columns(columns or {}, PARAMS), card_of)
        assert manifest.complaint() == ""
        return jobs(manifest)


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


BAD = {
    "{": "row: is not JSON",
    "[1]": "row: is not a JSON object",
    '"text"': "row: is not a JSON object",
    "[" * 100_000: "row: is not JSON",
    '{"prompt": "a", "prompt": "b"}': "row: has the same name twice",
    '{"prompt": "' + "x" * 300_000 + '"}': "row: is too large",
    '{"prompt": 5}': "prompt:",
    '{"prompt": null}': "prompt:",
    "{}": "prompt:",
    '{"prompt": "' + "x" * 201 + '"}': "prompt: has 201 characters",
    '{"prompt": "a\\ud800"}': "prompt:",
    '{"prompt": "a", "colour": 1}': "colour",
    '{"prompt": "a", "negative_prompt": 1}': "negative_prompt:",
    '{"prompt": "a", "model": "No such/model!"}': "model:",
    '{"prompt": "a", "task": "t2v"}': "task:",
    '{"prompt": "a", "seed": -1}': "seed:",
    '{"prompt": "a", "seed": 1.5}': "seed:",
    '{"prompt": "a", "seed": 9223372036854775808}': "seed:",
    '{"prompt": "a", "seed": true}': "seed:",
    '{"prompt": "a", "num_outputs": 0}': "num_outputs:",
    '{"prompt": "a", "num_outputs": 5}': "num_outputs: 5 is too large",
    '{"prompt": "a", "params": 5}': "params: must be an object",
    '{"prompt": "a", "params": {"steps": NaN}}': "params.steps: must be a finite number",
    '{"prompt": "a", "params": {"steps": 0}}': "params.steps:",
    '{"prompt": "a", "params": {"steps": "many"}}': "params.steps:",
    '{"prompt": "a", "params": {"height": 24}}': "params.height:",
    '{"prompt": "a", "params": {"height": 1024, "width": 1024}}': "params.height: 1024 x width 1024 is too large",
    '{"prompt": "a", "params": {"sampler": "dpm"}}': "params.sampler:",
    '{"prompt": "a", "params": {"label": "UPPER"}}': "params.label:",
    '{"prompt": "a", "params": {"sigmas": [1, 2, 3, 4, 5]}}': "params.sigmas:",
    '{"prompt": "a", "params": {"colour": 1}}': "params.colour:",
    '{"prompt": "a", "params": {"a b": 1}}': "params:",
    '{"prompt": "a", "params": {"steps": {"x": 1}}}': "params.steps:",
    '{"prompt": "a", "id": "../x"}': "id:",
    '{"prompt": "a", "id": 7}': "id:",
    '{"prompt": "a", "run": "another"}': "run:",
    '{"prompt": "a", "output": {"format": "jpeg"}}': "output.format: jpeg is not made",
    '{"prompt": "a", "output": {"quality": 0}}': "output.quality:",
    '{"prompt": "a", "output": {"prefix": "../up"}}': "output.prefix:",
    '{"prompt": "a", "inputs": {"image": ["s3://b/k.png"]}}': "inputs.image:",
    '{"prompt": "a", "inputs": {"image": ["ftp://b/k.png"]}}': "inputs.image",
    '{"prompt": "a", "inputs": {"image": ["a\\u0000.png"]}}': "inputs.image: is no path",
    '{"prompt": "a", "inputs": {"mask": ["a\\ud800.png"]}}': "inputs.mask: is no path",
    '{"prompt": "a", "seed": ' + "1" * 5000 + "}": "row: is not JSON",
    '{"prompt": "a", "idempotency_key": "k"}': "idempotency_key: is none of a row's",
    '{"prompt": "a", "loras": [{"name": "x"}]}': "loras:",
    '{"prompt": "a", "tags": ["t", "t"]}': "tags:",
    '{"prompt": "a", "priority": "urgent"}': "priority:",
    '{"prompt": "a", "deadline": "tomorrow"}': "deadline:",
    '{"prompt": "a", "tenant": "a b"}': "tenant:",
    '{"prompt": "a", "version": 2}': "version:",
}


def test_every_kind_of_bad_row_is_told_at_once_by_its_line(tmp_path: Path, manifest: Manifest) -> None:
    assert len(BAD) >= 30
    manifest.read(rows(tmp_path / "a.jsonl", {"prompt": "good"}, *BAD), expansion(), Columns(), card_of)
    assert (manifest.planned, manifest.bad) == (1, len(BAD))
    told = manifest.complaint().splitlines()
    for line, said in enumerate(BAD.values(), 2):
        assert any(_lines(one) >= {line} and said in one for one in told), (line, said, told)
    assert "xxxxx" not in manifest.complaint(), "no prompt in an error"


def test_numbers_that_nobody_reads_are_texts_in_a_table_and_in_flags(
    tmp_path: Path, manifest: Manifest
) -> None:
    long = "1" * 5000
    (tmp_path / "a.csv").write_text(f"prompt,steps\na,{long}\nb,3\n")
    manifest.read(tmp_path / "a.csv", expansion(), Columns({}, PARAMS), card_of)
    assert (manifest.bad, manifest.planned) == (1, 1)
    assert manifest.complaint().startswith("line 2: params.steps: ")
    with pytest.raises(ConfigError, match=r"params\.steps"):
        check_flags(Flags([f"steps={long}"]).expansion("r", MODEL), card_of)


def test_pipes_devices_and_circles_of_links_are_no_input_files(tmp_path: Path, manifest: Manifest) -> None:
    store = LocalStorage(tmp_path / "store")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "circle.png").symlink_to(tmp_path / "circle.png")
    path = rows(
        tmp_path / "a.jsonl",
        *({"prompt": "a", "inputs": {"image": [name]}} for name in ("pipe.png", "/dev/zero", "circle.png")),
    )
    manifest.read(path, expansion(), Columns({}, PARAMS), card_of, lambda: store)
    assert manifest.bad == 3
    assert "pipe.png: a pipe or a device" in manifest.complaint()
    assert "/dev/zero: a pipe or a device" in manifest.complaint()


def test_a_file_that_changes_under_a_plan_is_told(tmp_path: Path) -> None:
    card = CARD.model_copy(update={"inputs": ["image"]})
    store = LocalStorage(tmp_path / "store")
    (tmp_path / "1.png").write_bytes(image(color=(1, 2, 3)))
    path = rows(tmp_path / "a.jsonl", {"prompt": "a", "task": "i2i", "inputs": {"image": ["1.png"]}})
    with Manifest() as manifest:
        manifest.read(path, expansion(), Columns({}, PARAMS), lambda _: card, lambda: store)
        (tmp_path / "1.png").write_bytes(image(color=(3, 2, 1)))
        with pytest.raises(ConfigError, match=r"1\.png changed while the manifest was read: start again"):
            manifest.upload()


def test_a_plan_that_finds_no_room_is_one_line(tmp_path: Path, manifest: Manifest) -> None:
    manifest._db.execute("PRAGMA max_page_count = 12")
    path = rows(tmp_path / "a.jsonl", *({"prompt": f"p{i}"} for i in range(500)))
    with pytest.raises(
        ConfigError, match=r"the plan cannot be written under .+ \(TMPDIR names another folder\)"
    ):
        manifest.read(path, expansion(), Columns(), card_of)


def test_lines_of_a_table_are_counted_with_its_empty_ones(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / "a.csv").write_text('prompt,seed\n\n"a\nb",1\n\n\nc,x\n')
    manifest.read(tmp_path / "a.csv", expansion(), Columns({}, PARAMS), card_of)
    assert manifest.complaint().startswith("line 7: seed: ")
    (tmp_path / "b.csv").write_text('prompt,seed\na,1\n"b"c,1\n')
    with pytest.raises(ConfigError, match=r"the row that begins behind line 2: ',' expected after '\"'"):
        read(tmp_path / "b.csv")


def _lines(told: str) -> set[int]:
    numbers = told.partition(":")[0].replace("lines", "").replace("line", "")
    return {int(number) for number in numbers.split(",") if number.strip().isdecimal()}


def test_the_same_reason_is_told_once_with_its_lines(tmp_path: Path, manifest: Manifest) -> None:
    bad = {"prompt": "a", "params": {"steps": 0}}
    rows(tmp_path / "a.jsonl", {"prompt": "good"}, *([bad] * 12), "{")
    manifest.read(tmp_path / "a.jsonl", expansion(), Columns(), card_of)
    first, second = manifest.complaint().splitlines()
    assert first.startswith("lines 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 2 more: params.steps")
    assert second.startswith("line 14: row: is not JSON")


@pytest.mark.parametrize(
    ("sets", "matrix", "seeds", "said"),
    [
        (["steps=0"], [], None, "params.steps"),
        (["colour=1"], [], None, "params.colour"),
        (["num_outputs=9"], [], None, "num_outputs"),
        (["format=jpeg"], [], None, "output.format"),
        ([], ["steps=4,0"], None, "params.steps"),
        (["steps"], [], None, "write it as name=value"),
        (["steps=1", "steps=2"], [], None, "given twice"),
        ([], ["steps=4,4"], None, "different values"),
        ([], ["seed=1,2"], None, "use --seeds"),
        ([], [], "3..0", "--seeds"),
        ([], [], "1,1", "--seeds"),
        ([], [], "x", "--seeds"),
        ([], [], "0..9999999", "--seeds"),
    ],
)
def test_a_flag_that_no_row_can_have_is_told_once(
    sets: list[str], matrix: list[str], seeds: str | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_flags(Flags(sets, seeds, matrix).expansion("r", MODEL), card_of)


def test_a_row_that_says_what_a_flag_multiplies_is_bad(tmp_path: Path, manifest: Manifest) -> None:
    rows(
        tmp_path / "a.jsonl",
        {"prompt": "a", "seed": 1},
        {"prompt": "b", "params": {"guidance": 1}},
        {"prompt": "c"},
    )
    manifest.read(tmp_path / "a.jsonl", expansion(seeds="0..1", matrix=["guidance=3,5"]), Columns(), card_of)
    assert (manifest.bad, manifest.planned) == (2, 4)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b"", "no rows"),
        ("a.jsonl", b"\n \n", "no rows"),
        ("a.jsonl", b"\xff\xfe\x00", "not UTF-8"),
        ("a.csv", b"x,y\n1,2\n", "no column is the prompt.*'x', 'y'"),
        ("a.csv", b"prompt,prompt\n1,2\n", "same name"),
        ("a.csv", b'prompt\n"a', "unexpected end of data"),
        ("a.parquet", b"PAR1", "not a Parquet file"),
        ("a.xlsx", b"", "what is in it"),
    ],
)
def test_a_file_that_is_no_manifest_is_refused(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read(path)


def test_a_column_that_is_not_there_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\na\n")
    with pytest.raises(ConfigError, match="no column 'caption'; there are 'text'"):
        read(tmp_path / "a.csv", columns={"caption": "prompt"})


def test_ragged_rows_of_a_table_are_bad_rows(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / "a.csv").write_text("prompt,seed\na,1\nb\nc,1,2\nd,\n")
    manifest.read(tmp_path / "a.csv", expansion(), Columns({}, PARAMS), card_of)
    assert manifest.complaint().startswith("lines 3, 4: row: has more or fewer cells")
    assert manifest.planned == 2


def test_a_missing_library_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"pip install 'saggar\[datasets\]'"):
        read(tmp_path / "a.parquet")


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
