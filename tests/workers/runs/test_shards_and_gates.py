"""Runs into shards and through gates, on one machine: read back by the libraries that trainings use."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import webdataset
from PIL import Image
from saggar.engine.models.noop import colour
from saggar.storage.base import open_storage

from tests.workers.runs.support import is_clean, manifest, packed, prompts, saggar

pytestmark = pytest.mark.e2e


def run(file: Path, noop: Path, out: Path, *flags: object) -> tuple[int, str]:
    return saggar("run", file, "--model", noop, "--to", out, "--executor", "local", *flags)


def is_made_again(out: Path, noop: Path) -> bool:
    """Whether samples out of the shards come out equal."""
    status, said = saggar("verify", out, "--regenerate", 3, "--model", noop, "--executor", "local")
    assert "3 of 3 samples are the same again" in said, said
    return status == 0


def success(out: Path, name: str = "p") -> dict[str, object]:
    return json.loads((out / f"_runs/{name}/_SUCCESS").read_text())


def test_webdataset_reads_what_a_run_has_packed(tmp_path: Path, noop: Path) -> None:
    out = tmp_path / "out"
    file = manifest(
        tmp_path / "p.jsonl",
        [{"id": f"row.{i}", "prompt": f"p{i}", "seed": i, "num_outputs": 1 + i % 2} for i in range(10)],
    )
    flags = ("--format", "webdataset", "--shard-count", 4)
    status, said = run(file, noop, out, *flags)
    assert status == 0, said
    shards = sorted(map(str, (out / "p/data").glob("*.tar")))
    found = list(webdataset.WebDataset(shards, shardshuffle=False).decode("rgb8"))
    assert len(found) == 15, "five rows have two pictures"
    for sample in found:
        meta = sample["json"] if isinstance(sample["json"], dict) else json.loads(sample["json"])
        wanted = colour(sample["txt"], meta["seed"])
        assert np.array_equal(sample["png"][0, 0], wanted.astype(np.uint8))
        assert sample["__key__"].startswith("row_")
    assert is_clean(open_storage(str(out)))
    assert success(out)["shards"] == len(shards)
    assert not [path for path in (out / "_runs/p/objects").rglob("*") if path.is_file()]
    assert (out / "contact-sheet.png").exists()
    assert is_made_again(out, noop)

    shutil.rmtree(out / ".saggar")  # the queue is lost, the target knows
    status, said = run(file, noop, out, *flags)
    assert status == 0, said
    assert "10 jobs, 10 done before" in said
    assert packed(open_storage(str(out)), "p") == [sample["__key__"] for sample in found]


def test_datasets_reads_parquet_and_an_extended_run_adds_a_shard(tmp_path: Path, noop: Path) -> None:
    out = tmp_path / "out"
    flags = ("--format", "parquet", "--shard-mb", 50)
    assert run(prompts(tmp_path / "p.jsonl", 6), noop, out, *flags)[0] == 0
    status, said = run(prompts(tmp_path / "p.jsonl", 9), noop, out, *flags, "--extend")
    assert status == 0, said
    assert "9 jobs, 6 done before" in said
    loaded = datasets.load_dataset(
        "parquet", data_files=str(out / "p/data/*.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert len(loaded) == len(set(loaded["key"])) == 9
    assert set(loaded["caption"]) == {f"p{i}" for i in range(9)}
    row = loaded[0]
    assert np.array_equal(
        np.asarray(row["image"])[0, 0], colour(row["caption"], row["seed"]).astype(np.uint8)
    )
    assert success(out)["done"] == 9
    assert is_clean(open_storage(str(out)))
    assert is_made_again(out, noop)


def test_refused_pictures_are_drawn_again_and_counted(tmp_path: Path, noop: Path) -> None:
    """Half of the rows may not be accepted at all: a gate that no picture of theirs passes."""
    out = tmp_path / "out"
    file = manifest(tmp_path / "p.jsonl", [{"prompt": f"p{i}", "seed": 1000 * i} for i in range(30)])
    level, redraws = 220, 1
    status, said = run(file, noop, out, "--gate", f"black>={level}", "--redraws", redraws, "--seeds", "3")
    assert status == 2
    assert "every row is bad, nothing was queued" in said, "they have seeds of their own"
    status, said = run(file, noop, out, "--gate", f"black>={level}", "--redraws", redraws)

    def bright(n: int, draw: int) -> bool:
        return bool(brightness(f"p{n}", 1000 * n + draw) >= level)

    first = [bright(n, 0) for n in range(30)]
    accepted = sum(first[n] or bright(n, 1) for n in range(30))
    assert f"{accepted} succeeded, {30 - accepted} rejected" in said
    mark = success(out)
    assert (mark["done"], mark["rejected"], mark["redrawn"]) == (accepted, 30 - accepted, first.count(False))
    lines = [json.loads(line) for line in (out / "_runs/p/accepted.jsonl").read_text().splitlines()]
    assert len(lines) == accepted
    pictures = {path.parents[1].name: path for path in out.glob("*/a*/*.png")}
    assert {line["job"] for line in lines} == set(pictures), "what was refused is gone"
    assert 0 < accepted < 30
    with Image.open(out / "contact-sheet.png") as sheet:
        assert sheet.width > 128
    report = json.loads((out / "_runs/p/report.json").read_text())
    assert report["rejections"] == {"black": report["drawn"] - accepted}
    assert is_clean(open_storage(str(out)))


def brightness(prompt: str, seed: int) -> float:
    """As the gate `black` measures a picture of one colour."""
    from saggar.workers.runs.gates import Candidate, parse_gates

    array = np.broadcast_to(colour(prompt, seed).astype(np.uint8), (64, 64, 3))
    return parse_gates(["black>=0"]).judge(Candidate("k", array, 1)).verdicts[0].value


def test_accept_gathers_pictures_over_draws(tmp_path: Path, noop: Path) -> None:
    out = tmp_path / "out"
    file = manifest(tmp_path / "p.jsonl", [{"prompt": f"p{i}", "seed": 1000 * i} for i in range(6)])
    flags = ("--gate", "black>=100", "--accept", 3, "--redraws", 40, "--format", "webdataset")
    status, said = run(file, noop, out, *flags)
    assert status == 0, said
    keys = packed(open_storage(str(out)), "p")
    assert len(keys) == len(set(keys)) == 18
    shards = sorted(map(str, (out / "p/data").glob("*.tar")))
    seeds: dict[str, list[int]] = {}
    for sample in webdataset.WebDataset(shards, shardshuffle=False).decode("rgb8"):
        meta = sample["json"] if isinstance(sample["json"], dict) else json.loads(sample["json"])
        seeds.setdefault(sample["txt"], []).append(meta["seed"])
    for i in range(6):
        bright = [seed for seed in range(1000 * i, 1000 * i + 41) if brightness(f"p{i}", seed) >= 100]
        assert sorted(seeds[f"p{i}"]) == bright[:3]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gate", "beauty"], "beauty"),
        (["--accept", "2"], "give --gate too"),
        (["--shard-mb", "5"], "give --format"),
        (
            ["--format", "webdataset", "--shard-mb", "nan"],
            "--shard-mb: nan is no size",
        ),
        (["--format", "webdataset", "--shard-mb", "inf"], "--shard-mb: inf is no size"),
        (["--format", "webdataset", "--shard-mb", "0"], "--shard-mb: 0.0 is no size"),
        (["--name", "../x"], "--name: has a form that is not allowed"),
    ],
)
def test_what_says_nothing_together_is_one_line(
    tmp_path: Path, noop: Path, flags: list[str], said: str
) -> None:
    status, told = run(prompts(tmp_path / "p.jsonl", 1), noop, tmp_path / "out", *flags)
    assert status == 2
    assert said in told
    assert "Traceback" not in told
