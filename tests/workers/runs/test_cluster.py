"""Runs on a cluster: results are fetched, workers control what was detached, runs are steered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from saggar.jobs.client import JobClient
from saggar.jobs.runs import Run, RunLedger
from saggar.jobs.settings import connect
from saggar.storage.base import open_storage

from tests.support.cluster import until
from tests.workers.conftest import StartWorker
from tests.workers.runs.support import is_clean, packed, prompts, saggar

pytestmark = pytest.mark.e2e
Ask = Callable[[str], Run]


@pytest.fixture
def standing(client: JobClient):
    """How a run stands."""
    connection = connect(client.settings)
    yield RunLedger(connection, client.settings).get
    connection.close()


def test_pictures_end_up_in_the_folder_that_was_asked_for(
    redis_url: str, start_worker: StartWorker, tmp_path: Path
) -> None:
    start_worker().ready("noop")
    out = tmp_path / "out"
    flags = ("--redis", redis_url, "--model", "noop", "--to", out)
    status, said = saggar("run", prompts(tmp_path / "p.jsonl", 12), *flags)
    assert status == 0, said
    assert "12 succeeded" in said
    assert len(list(out.glob("*/a1/*.png"))) == len(list(out.glob("*/result.json"))) == 12
    assert (out / "contact-sheet.png").exists()
    assert is_clean(open_storage(str(out)))
    status, said = saggar("run", prompts(tmp_path / "p.jsonl", 12), *flags)
    assert "12 jobs, 12 done before" in said
    assert "nothing to make" in said


def test_shards_of_a_cluster_and_its_store_is_left_clean(
    redis_url: str, start_worker: StartWorker, tmp_path: Path
) -> None:
    start_worker().ready("noop")
    out = tmp_path / "out"
    flags = (
        "--redis",
        redis_url,
        "--model",
        "noop",
        "--to",
        out,
        "--format",
        "parquet",
        "--shard-count",
        "30",
    )
    status, said = saggar("run", prompts(tmp_path / "p.jsonl", 80), *flags)
    assert status == 0, said
    storage = open_storage(str(out))
    assert len(packed(storage, "p")) == len(set(packed(storage, "p"))) == 80
    assert is_clean(storage)
    left = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and ".tmp" not in str(path)]
    assert left == [], "single objects go once they are in shards"


def detached(redis_url: str, folder: Path, name: str, count: int) -> None:
    flags = (
        "--redis",
        redis_url,
        "--model",
        "noop",
        "--to",
        (folder / "out").as_uri(),
        "--window",
        "8",
        "--detach",
    )
    status, said = saggar("run", prompts(folder / f"{name}.jsonl", count), *flags)
    assert status == 0, said
    assert "goes on without this command" in said


@pytest.mark.usefixtures("noop_card")
def test_a_controller_that_wakes_after_its_lease_changes_nothing(
    redis_url: str, client: JobClient, start_worker: StartWorker, tmp_path: Path, standing: Ask
) -> None:
    lease = {"SAGGAR_RUN_LEASE_S": "1"}
    sleeper = start_worker("--chores", model="", environ=lease)
    detached(redis_url, tmp_path, "p", 40)
    until(lambda: standing("p").open == 8, what="a full window")
    for process in sleeper.family():
        process.suspend()
    start_worker("--chores", model="", environ=lease)
    start_worker().ready("noop")
    until(lambda: standing("p").state == "done", 60, "the run's end")
    out = tmp_path / "out"
    before, mark = standing("p"), (out / "_runs/p/_SUCCESS").read_bytes()
    for process in reversed(sleeper.family()):
        process.resume()
    sleeper.terminate()  # waits for the threads that control runs
    after = standing("p")
    assert (after.state, after.done, after.pictures, after.batched) == ("done", 40, 40, 40)
    assert (after.cursor, after.open, after.bytes) == (before.cursor, 0, before.bytes)
    assert (out / "_runs/p/_SUCCESS").read_bytes() == mark
    assert client.counts(run="p")["queued"] == 0
    assert is_clean(open_storage(str(out)))


@pytest.mark.usefixtures("noop_card")
def test_a_detached_run_needs_no_client(
    redis_url: str, client: JobClient, start_worker: StartWorker, tmp_path: Path, standing: Ask
) -> None:
    """It is steered while no worker serves its model yet."""
    start_worker("--chores", model="")
    detached(redis_url, tmp_path, "p", 60)
    until(lambda: standing("p").open == 8, what="a full window")
    assert saggar("runs", "pause", "p", "--redis", redis_url) == (0, "p paused\n")
    until(lambda: standing("p").open == 0, what="an empty window")
    until(lambda: client.counts(run="p")["queued"] == 0, what="a queue without the run")
    _, said = saggar("runs", "show", "p", "--redis", redis_url)
    assert "because: by hand" in said
    assert saggar("runs", "resume", "p", "--redis", redis_url) == (0, "p running\n")
    start_worker().ready("noop")
    until(lambda: standing("p").state == "done", 60, "the run's end")
    out = tmp_path / "out"
    assert len(list(out.glob("*/result.json"))) == 60
    assert (out / "_runs/p/_SUCCESS").exists()
    report = json.loads((out / "_runs/p/report.json").read_text())
    assert (report["planned"], report["done"]) == (60, 60)
    _, said = saggar("runs", "list", "--redis", redis_url)
    assert "60/60 done" in said


@pytest.mark.usefixtures("noop_card")
def test_a_detached_run_is_cancelled_and_made_whole_again(
    redis_url: str, start_worker: StartWorker, tmp_path: Path, standing: Ask
) -> None:
    start_worker("--chores", model="")
    detached(redis_url, tmp_path, "p", 40)
    until(lambda: standing("p").open == 8, what="a full window")
    assert saggar("runs", "cancel", "p", "--redis", redis_url) == (0, "p cancelled\n")
    until(lambda: standing("p").complete, what="every row settled")
    assert (standing("p").cancelled, standing("p").state) == (40, "cancelled")
    start_worker().ready("noop")
    _, said = saggar("runs", "retry", "p", "--end", "cancelled", "--redis", redis_url)
    assert said.startswith("40 rows")
    until(lambda: standing("p").state == "done", 60, "the run's end")
    assert standing("p").done == 40
    assert saggar("runs", "pause", "p", "--redis", redis_url)[0] == 2
    until(lambda: not standing("p").held, what="a run that nobody holds")
    assert saggar("runs", "forget", "p", "--redis", redis_url)[0] == 0
    assert saggar("runs", "show", "p", "--redis", redis_url)[0] == 2


def test_two_runs_are_compared(redis_url: str, start_worker: StartWorker, tmp_path: Path) -> None:
    start_worker().ready("noop")
    flags = ("--redis", redis_url, "--model", "noop", "--to", tmp_path / "out")
    file = tmp_path / "p.jsonl"
    rows = [{"prompt": f"p{i}", "seed": i} for i in range(6)]
    for name, steps in (("one", 4), ("two", 5)):
        rows[0]["params"] = {"steps": steps}
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert saggar("run", file, *flags, "--name", name)[0] == 0
    status, said = saggar("runs", "diff", "one", "two", "--redis", redis_url)
    assert status == 1
    assert said.splitlines() == [
        "5 rows in both",
        "1 rows of the same prompt differ:",
        "  params.steps 4 and 5: 1",
    ]
    assert saggar("runs", "diff", "one", "one", "--redis", redis_url)[0] == 0


@pytest.mark.usefixtures("noop_card")
def test_two_runs_go_on_side_by_side(
    redis_url: str, start_worker: StartWorker, tmp_path: Path, standing: Ask
) -> None:
    """A small run behind a large one does not wait for its end: a window is all that a run may have queued."""
    start_worker("--chores", model="")
    detached(redis_url, tmp_path, "large", 300)
    until(lambda: standing("large").open == 8, what="a full window")
    detached(redis_url, tmp_path, "small", 24)
    until(lambda: standing("small").open == 8, what="a full window")
    start_worker().ready("noop")
    until(lambda: {standing("small").state, standing("large").state} == {"done"}, 120, "the end of both")
    small, large = standing("small"), standing("large")
    assert small.ended is not None and large.ended is not None
    assert small.ended < large.ended


@pytest.mark.usefixtures("noop_card")
def test_cancelling_the_jobs_of_a_run_cancels_the_run(
    redis_url: str, start_worker: StartWorker, tmp_path: Path, standing: Ask
) -> None:
    start_worker("--chores", model="")
    detached(redis_url, tmp_path, "p", 20)
    until(lambda: standing("p").open == 8, what="a full window")
    status, said = saggar("cancel", "--run", "p", "--redis", redis_url)
    assert status == 0, said
    until(lambda: standing("p").complete, what="every row settled")
    assert (standing("p").cancelled, standing("p").state) == (20, "cancelled")
