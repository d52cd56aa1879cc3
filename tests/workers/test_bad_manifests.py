"""What is wrong with a manifest: each row by its line, all at once, and in one line what no row can mend."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from saggar.jobs.errors import ConfigError
from saggar.storage.local import LocalStorage
from saggar.workers.runs.launch import Flags, check_flags
from saggar.workers.runs.manifest import Manifest
from saggar.workers.runs.readers import Columns

from tests.jobs.samples import CARD, MODEL
from tests.support.inputs import image
from tests.workers.manifests import PARAMS, card_of, expansion, read, rows

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


def test_a_cell_that_no_job_can_hold_spoils_its_row_alone(tmp_path: Path, manifest: Manifest) -> None:
    long = "x" * 200_000
    (tmp_path / "a.csv").write_text(f'prompt,seed,note\na,1,\n{long},2,\n"b\n{long}",3,\nc,4,{long}\n')
    before = csv.field_size_limit()
    manifest.read(tmp_path / "a.csv", expansion(), Columns({}, PARAMS), card_of)
    assert (manifest.bad, manifest.planned) == (2, 2), "a column that means nothing may hold anything"
    assert manifest.complaint().splitlines() == [
        f"line {line}: prompt: has {count} characters (allowed: at most 200 characters)"
        for line, count in ((3, 200_000), (5, 200_002))
    ]
    assert "xxx" not in manifest.complaint()
    assert csv.field_size_limit() == before
    (tmp_path / "b.csv").write_text("prompt\n" + "x" * (17 << 20))
    with pytest.raises(ConfigError, match="behind line 1: field larger than field limit"):
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
        ("a.csv", b"", "a.csv is empty: its first line names the columns"),
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
