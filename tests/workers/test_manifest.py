"""Files of prompts: rows become jobs with ids and seeds of their content, or errors with their line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from saggar.jobs.errors import ConfigError
from saggar.jobs.schema import Job
from saggar.workers.runs.manifest import Manifest, parse_settings, read_manifest

DEFAULTS = {"model": "noop", "params": {"steps": 4}}


def read(path: Path, *rows: object, run: str = "r") -> Manifest:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return read_manifest(path, DEFAULTS, run, lambda job: job)


def test_rows_become_jobs_in_order_with_defaults_below_their_own(tmp_path: Path) -> None:
    found = read(
        tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b", "params": {"height": 32}, "model": "other"}
    )
    assert [job.prompt for job in found.jobs] == ["a", "b"]
    assert found.jobs[1].params == {"height": 32, "steps": 4}
    assert [job.model for job in found.jobs] == ["noop", "other"]
    assert {job.run for job in found.jobs} == {"r"}


def test_a_text_file_holds_a_prompt_a_line(tmp_path: Path) -> None:
    assert [job.prompt for job in read(tmp_path / "a.txt", "one", "", "two  ").jobs] == ["one", "two"]


def test_id_and_seed_come_from_content_and_run_alone(tmp_path: Path) -> None:
    first = read(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b"}).jobs
    again = read(tmp_path / "b.jsonl", {"prompt": "b"}, {"prompt": "a"}).jobs
    assert {job.prompt: (job.id, job.seed) for job in first} == {
        job.prompt: (job.id, job.seed) for job in again
    }
    other = read(tmp_path / "a.jsonl", {"prompt": "a"}, run="other").jobs
    assert other[0].id != first[0].id
    changed = read(tmp_path / "a.jsonl", {"prompt": "a", "params": {"steps": 5}}).jobs
    assert changed[0].id != first[0].id


def test_what_a_row_says_itself_stays(tmp_path: Path) -> None:
    job = read(tmp_path / "a.jsonl", {"prompt": "a", "id": "mine", "seed": 0}).jobs[0]
    assert (job.id, job.seed) == ("mine", 0)


def test_equal_rows_are_one_job(tmp_path: Path) -> None:
    found = read(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "a"}, {"prompt": "a", "seed": 1})
    assert (len(found.jobs), found.folded) == (2, 1)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "row: is not JSON"),
        ("[1]", "row: is not a JSON object"),
        ("[" * 100_000, "row: is not JSON"),
        ('{"prompt": 5}', "prompt"),
        ('{"prompt": "a", "colour": 1}', "colour"),
        ('{"prompt": "a", "params": 5}', "params: must be an object"),
        ('{"prompt": "a", "params": {"steps": NaN}}', "params.steps: must be a finite number"),
        ('{"prompt": "a", "seed": -1}', "seed"),
        ('{"prompt": "a", "id": "../x"}', "id"),
    ],
)
def test_a_bad_row_is_told_by_its_line(tmp_path: Path, row: str, said: str) -> None:
    found = read(tmp_path / "a.jsonl", {"prompt": "good"}, row)
    assert [bad.line for bad in found.bad] == [2]
    assert found.bad[0].reason.startswith(said)
    assert "\n" not in found.bad[0].reason


def test_what_the_card_refuses_is_told_as_well(tmp_path: Path) -> None:
    def refuse(job: Job) -> Job:
        from saggar.jobs.errors import InvalidJob

        raise InvalidJob("params.steps", "is too small", "1 and up")

    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}')
    assert read_manifest(path, DEFAULTS, "r", refuse).complaint() == (
        "line 1: params.steps: is too small (allowed: 1 and up)"
    )


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe\x00"])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        read_manifest(path, DEFAULTS, "r", lambda job: job)


def test_settings_are_json_where_they_can_be() -> None:
    assert parse_settings(["steps=4", "scale=2.5", "key=a=b", "flag=true", "zero=0", "empty="]) == {
        "steps": 4,
        "scale": 2.5,
        "key": "a=b",
        "flag": True,
        "zero": 0,
        "empty": "",
    }
    with pytest.raises(ConfigError, match="name=value"):
        parse_settings(["steps"])
