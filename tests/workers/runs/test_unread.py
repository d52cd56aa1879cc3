"""Texts that are longer than the model reads, in a run: counted once each, whatever breaks off, and told at its end."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from saggar.jobs.record import JobRecord, JobResult, Times, UnreadText
from saggar.jobs.runs import Ended
from saggar.jobs.schema import Job
from saggar.storage.base import open_storage
from saggar.storage.errors import Conflict
from saggar.storage.local import LocalStorage
from saggar.workers.runs.unread import UnreadRow, UnreadRows, in_words

from tests.workers.conftest import StartWorker
from tests.workers.runs.support import is_clean, manifest, saggar


def ended(n: int, tokens: int | None = None) -> Ended:
    """A row that has succeeded, of whose prompt two tokens are read if it has so many."""
    unread = (UnreadText(field="prompt", read_tokens=2, tokens=tokens),) if tokens else None
    job = Job(id=f"j{n}", model="noop", prompt="p")
    record = JobRecord(
        id=f"j{n}",
        state="succeeded",
        job=job,
        digest="d",
        times=Times(submitted=datetime(2030, 1, 1, tzinfo=UTC)),
        result=JobResult(outputs=[], attempt=1, unread=unread),
    )
    return Ended(n, 0, record)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


@pytest.fixture
def rows(storage: LocalStorage) -> UnreadRows:
    return UnreadRows(storage, "_runs/r")


def numbers(rows: UnreadRows) -> list[int]:
    return [row.row for row in rows.rows()]


def test_where_all_is_read_nothing_is_written(rows: UnreadRows, storage: LocalStorage) -> None:
    rows.note([ended(0), ended(1)])
    assert rows.rows() == rows.gather() == []
    assert list(storage.list("")) == []


def test_what_is_noted_is_gathered_in_order(rows: UnreadRows, storage: LocalStorage) -> None:
    rows.note([ended(7, 3), ended(8)])
    rows.note([ended(2, 4)])
    assert numbers(rows) == [2, 7]
    assert [row.row for row in rows.gather()] == [2, 7]
    assert [info.key for info in storage.list("")] == ["_runs/r/unread.jsonl"]
    (first, _) = storage.get(rows.key).splitlines()
    told = [{"field": "prompt", "read_tokens": 2, "tokens": 4}]
    assert json.loads(first) == {"row": 2, "job": "j2", "unread": told}


def test_a_chunk_that_is_judged_again_counts_once_and_loses_none(rows: UnreadRows) -> None:
    """A crash between the note and the settling, after which the rows come in other chunks."""
    rows.note([ended(5, 3), ended(9, 3)])
    rows.note([ended(5, 3)])
    assert numbers(rows) == [5, 9]


def test_a_run_that_goes_on_adds_to_what_was_gathered(rows: UnreadRows) -> None:
    rows.note([ended(5, 3)])
    rows.gather()
    rows.note([ended(3, 3)])
    assert [row.row for row in rows.gather()] == numbers(rows) == [3, 5]


def test_a_gathering_that_was_broken_off_is_made_again(
    rows: UnreadRows, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows.note([ended(5, 3)])
    with monkeypatch.context() as patch:
        patch.setattr(storage, "delete", lambda keys: (_ for _ in ()).throw(ConnectionError()))
        with pytest.raises(ConnectionError):
            rows.gather()
    assert [row.row for row in rows.gather()] == [5]
    assert [info.key for info in storage.list("")] == ["_runs/r/unread.jsonl"]


def test_what_cannot_be_read_is_named(rows: UnreadRows, storage: LocalStorage) -> None:
    storage.put(rows.key, b"no json\n", content_type="application/x-ndjson")
    with pytest.raises(Conflict, match=r"_runs/r/unread.jsonl cannot be read"):
        rows.rows()


def test_it_is_told_in_words() -> None:
    def row(*reads: int) -> UnreadRow:
        unread = tuple(UnreadText(field="prompt", read_tokens=read, tokens=99) for read in reads)
        return UnreadRow(row=0, job="j", unread=unread)

    assert in_words([row(75)]) == "1 row has a text that is longer than the model reads (75 tokens)"
    assert in_words([row(75), row(62, 75)]) == (
        "2 rows have a text that is longer than the model reads (62 to 75 tokens)"
    )


SECRET = "confidential"
ROWS: list[dict[str, object]] = [
    {"id": "short", "prompt": "one two"},
    {"id": "long", "prompt": f"one two {SECRET}"},
    {"id": "longer", "prompt": f"one two three {SECRET}"},
]
SAID = "2 rows have a text that is longer than the model reads (2 tokens), and the rest is not seen: "


def unread_samples(out: Path) -> Iterator[dict[str, Any]]:
    """Metadata of the samples in shards that have a text which is too long."""
    for shard in out.glob("p/data/*.tar"):
        with tarfile.open(shard) as tar:
            for member in tar:
                data = tar.extractfile(member)
                if member.name.endswith(".json") and data is not None:
                    told = json.load(data)
                    if "unread" in told:
                        yield told


@pytest.mark.parametrize("format_", ["objects", "webdataset"])
def test_a_run_says_it_at_its_end(tmp_path: Path, noop: Path, format_: str) -> None:
    out = tmp_path / "out"
    file = manifest(tmp_path / "p.jsonl", ROWS)
    flags = ("--model", noop, "--to", out, "--executor", "local", "--format", format_)
    for settings in (("--set", "reads=2"), ("--set", "reads=2")):  # the second time there is nothing to make
        status, said = saggar("run", file, *flags, *settings)
        assert status == 0, said
        assert SAID + str(out / "_runs/p/unread.jsonl") in said
    lines = [json.loads(line) for line in (out / "_runs/p/unread.jsonl").read_text().splitlines()]
    found = {line["job"].rpartition("-")[0]: line["unread"][0]["tokens"] for line in lines}
    assert found == {"long": 3, "longer": 4}
    packed = {told["job"].rpartition("-")[0]: told["unread"][0]["tokens"] for told in unread_samples(out)}
    assert packed == (found if format_ == "webdataset" else {})
    assert is_clean(open_storage(str(out)))
    note = out / "_runs/p/unread/00000001-0123abcd.jsonl"  # as a run that goes on has some
    note.write_bytes((out / "_runs/p/unread.jsonl").read_bytes())
    assert is_clean(open_storage(str(out)))
    note.unlink()
    report = json.loads((out / "_runs/p/report.json").read_text())
    assert (report["unread"], len(report["unread_examples"])) == (2, 2)
    kept = [*out.glob("_runs/p/unread*"), *out.glob("_runs/p/report*"), *(out / ".saggar").rglob("*.log")]
    assert len(kept) > 2
    # The page and the record of the run tell of rows and numbers; the texts stay with the jobs.
    assert not [path for path in kept if path.is_file() and SECRET.encode() in path.read_bytes()]


@pytest.mark.e2e
def test_submit_status_and_watch_say_it(redis_url: str, start_worker: StartWorker) -> None:
    start_worker().ready("noop")
    flags = ("--model", "noop", "--set", "reads=2", "--redis", redis_url)
    line = "the prompt is longer than the model reads: 2 of its 3 tokens count"
    status, said = saggar("submit", "one two three", "--id", "long", "--wait", *flags)
    assert (status, said.count(line)) == (0, 1), said
    status, said = saggar("status", "long", "--redis", redis_url)
    assert f"unread     {line}\n" in said
    status, said = saggar("watch", "long", "--redis", redis_url)
    assert 'unread=[{"field":"prompt","read_tokens":2,"tokens":3}]' in said
    status, said = saggar("submit", "one two", "--id", "short", "--wait", *flags)
    assert (status, "longer" in said) == (0, False)
