"""Results that are lost or changed between their making and their packing: made again, or said, never passed over."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import redis
from saggar.jobs.client import JobClient
from saggar.jobs.runs import Controller, Ended, Run, RunLedger, RunSpec, Verdict
from saggar.jobs.settings import connect
from saggar.storage.base import Storage, open_storage
from saggar.storage.errors import Conflict
from saggar.workers.runs.drive import drive
from saggar.workers.runs.finish import RunFinisher, staging
from saggar.workers.runs.folder import RunFolder
from saggar.workers.runs.launch import Flags
from saggar.workers.runs.manifest import Manifest
from saggar.workers.runs.pack import SHOWN
from saggar.workers.runs.place import CardDesk
from saggar.workers.runs.readers import Columns

from tests.support.cluster import until
from tests.workers.conftest import StartWorker
from tests.workers.runs.support import is_clean, packed

pytestmark = pytest.mark.e2e
ROWS, NAME = 20, "r"


class Losing(RunFinisher):
    """What `lose` does to the store of the workers comes between the judging of rows and their packing."""

    lose: Callable[[Sequence[Ended]], None] = staticmethod(lambda ended: None)

    def judge(self, ended: Sequence[Ended]) -> Sequence[Verdict]:
        verdicts = super().judge(ended)
        self.lose(ended)
        return verdicts


@pytest.fixture
def connection(client: JobClient) -> Iterator[redis.Redis]:
    connection = connect(client.settings)
    yield connection
    connection.close()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Storage]:
    storage = open_storage(str(tmp_path / "out"))
    yield storage
    storage.close()


def plan_it(
    client: JobClient,
    connection: redis.Redis,
    target: Storage,
    tmp_path: Path,
    form: str = "webdataset",
    rows: int = ROWS,
) -> RunSpec:
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p{i}", "seed": i}) + "\n" for i in range(rows)))
    prefix = staging(NAME) if form != "objects" else ""
    with Manifest() as manifest:
        manifest.read(file, Flags().expansion(NAME, "noop", prefix), Columns(), CardDesk(client.settings))
        spec = RunSpec.model_validate(
            {
                "name": NAME,
                "target": target.url,
                "model": "noop",
                "digest": manifest.digest,
                "planned": manifest.planned,
                "prefix": prefix,
                "format": form,
                "shard_count": 7 if form != "objects" else None,
            }
        )
        RunFolder(target, NAME).write_plan(spec, manifest.lines())
        RunLedger(connection, client.settings).open(spec)
    return spec


def finish_it(
    client: JobClient,
    connection: redis.Redis,
    target: Storage,
    spec: RunSpec,
    lose: Callable[[Sequence[Ended]], None] = Losing.lose,
) -> Run:
    folder = RunFolder(target, NAME)
    controller = Controller(NAME, client, connection, folder)
    controller.claim(force=True)
    finisher = Losing(spec, client, controller, target, folder)
    finisher.lose = lose
    controller.finisher = finisher
    try:
        return drive(controller)
    finally:
        finisher.close()


def run_it(
    client: JobClient,
    connection: redis.Redis,
    target: Storage,
    tmp_path: Path,
    lose: Callable[[Sequence[Ended]], None],
    form: str = "webdataset",
) -> Run:
    return finish_it(client, connection, target, plan_it(client, connection, target, tmp_path, form), lose)


def files(store: Path, one: Ended, pattern: str) -> list[Path]:
    return list((store / staging(NAME) / one.record.id).rglob(pattern))


@pytest.mark.parametrize("damage", ["gone", "changed", "sidecar", "manifest", "everything"])
def test_rows_whose_results_are_lost_before_they_are_packed_are_made_again(
    client: JobClient,
    connection: redis.Redis,
    target: Storage,
    start_worker: StartWorker,
    tmp_path: Path,
    damage: str,
) -> None:
    start_worker().ready("noop")
    hurt: set[int] = set()

    def lose(ended: Sequence[Ended]) -> None:
        for one in ended:
            if one.n % 7 or one.n in hurt:
                continue
            hurt.add(one.n)
            name = {"sidecar": "0-*.json", "manifest": "result.json", "everything": "*.*"}.get(
                damage, "*.png"
            )
            found = files(tmp_path / "store", one, name)
            assert found
            for path in found:
                path.unlink() if damage in ("gone", "everything") else path.write_bytes(b"junk")

    run = run_it(client, connection, target, tmp_path, lose)
    assert hurt == {0, 7, 14}
    assert (run.state, run.done, run.failed) == ("done", ROWS, 0)
    keys = packed(target, NAME)
    assert len(keys) == len(set(keys)) == ROWS
    assert is_clean(target)


def test_what_is_lost_again_and_again_is_told(
    client: JobClient, connection: redis.Redis, target: Storage, start_worker: StartWorker, tmp_path: Path
) -> None:
    start_worker().ready("noop")

    made = []

    def lose(ended: Sequence[Ended]) -> None:
        for one in ended:
            for path in files(tmp_path / "store", one, "*.png") if one.n == 3 else ():
                made.append(one.n)
                path.unlink()

    with pytest.raises(Conflict, match="the pictures of row 3 were made again 3 times, and are gone"):
        run_it(client, connection, target, tmp_path, lose)
    assert len(made) == 1 + 3
    assert target.head(f"_runs/{NAME}/_SUCCESS") is None


def test_a_contact_sheet_lacks_what_somebody_took_away(
    client: JobClient, connection: redis.Redis, target: Storage, start_worker: StartWorker, tmp_path: Path
) -> None:
    start_worker().ready("noop")

    def lose(ended: Sequence[Ended]) -> None:
        for one in ended:
            for path in (tmp_path / "out" / one.record.id).rglob("*.png") if one.n == 3 else ():
                path.unlink()

    run = run_it(client, connection, target, tmp_path, lose, "objects")
    assert (run.state, run.done) == ("done", ROWS)
    assert target.head("contact-sheet.png") is not None


class Away(RunFinisher):
    """Redis goes away between the judging of rows and their settling, the first time that there are many."""

    gone = False

    def judge(self, ended: Sequence[Ended]) -> Sequence[Verdict]:
        verdicts = super().judge(ended)
        if len(ended) > ROWS and not self.gone:
            self.gone = True
            raise redis.ConnectionError("away")
        return verdicts


@pytest.mark.parametrize("away", [False, True])
def test_rows_that_are_found_twice_are_packed_once(
    client: JobClient,
    connection: redis.Redis,
    target: Storage,
    start_worker: StartWorker,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    away: bool,
) -> None:
    """Everything ended while nobody held the run: the next controller takes it all in at once, and finds it as done
    and not packed besides. What the first shards hold is no more where it was when it comes again: nothing is lost."""
    start_worker().ready("noop")
    rows = 2 * SHOWN
    spec = plan_it(client, connection, target, tmp_path, rows=rows)
    folder = RunFolder(target, NAME)
    first = Controller(NAME, client, connection, folder)
    until(lambda: first.step(0).cursor == rows, 60, "all rows queued")
    until(lambda: client.counts(NAME).get("succeeded") == rows, 60, "all jobs made")
    controller = Controller(NAME, client, connection, folder)
    controller.claim(force=True)
    finisher = (Away if away else RunFinisher)(spec, client, controller, target, folder)
    controller.finisher = finisher
    try:
        run = drive(controller)
    finally:
        finisher.close()
    assert not away or (isinstance(finisher, Away) and finisher.gone)
    assert (run.state, run.done) == ("done", rows)
    assert not [one.message for one in caplog.records if "lost" in one.message]
    assert len(client.list(run=NAME, state="succeeded", limit=1000).records) == rows
    assert target.head(f"_runs/{NAME}/_SUCCESS") is not None
    assert len(packed(target, NAME)) == rows
    assert is_clean(target)
