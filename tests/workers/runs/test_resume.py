"""A run that is killed at random rows and goes on ends with the outputs and bytes of one that was not."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis
from saggar.jobs.client import JobClient
from saggar.jobs.runs import Controller, Ended, Run, RunLedger, RunSpec, Verdict
from saggar.jobs.settings import connect
from saggar.storage.base import open_storage
from saggar.workers.runs.drive import drive
from saggar.workers.runs.finish import RunFinisher
from saggar.workers.runs.folder import RunFolder
from saggar.workers.runs.launch import Flags
from saggar.workers.runs.manifest import Manifest
from saggar.workers.runs.place import CardDesk
from saggar.workers.runs.readers import Columns

from tests.workers.conftest import StartWorker

pytestmark = pytest.mark.e2e
ROWS = 40


class Killed(Exception):
    """The controller's process is gone: nothing of it runs any more."""


class Dying(RunFinisher):
    """Dies at a row, before or after its result was taken in."""

    left = -1
    late = False

    def judge(self, ended: Sequence[Ended]) -> Sequence[Verdict]:
        self.left -= len(ended)
        if self.left < 0 and not self.late:
            raise Killed
        verdicts = super().judge(ended)
        if self.left < 0:
            raise Killed
        return verdicts


class Parts:
    """A controller with all it needs, over one Redis and one target."""

    def __init__(self, client: JobClient, connection: redis.Redis, target: Path, name: str) -> None:
        self.storage = open_storage(str(target))
        self.folder = RunFolder(self.storage, name)
        self.controller = Controller(name, client, connection, self.folder)
        index = self.folder.index()
        assert index is not None
        self.finisher = Dying(index.spec, client, self.controller, self.storage, self.folder)
        self.controller.finisher = self.finisher

    def close(self) -> None:
        self.finisher.close()
        self.storage.close()


@pytest.fixture
def connection(client: JobClient) -> Iterator[redis.Redis]:
    connection = connect(client.settings)
    yield connection
    connection.close()


def plan(client: JobClient, connection: redis.Redis, file: Path, target: Path, name: str) -> None:
    storage = open_storage(str(target))
    with Manifest() as manifest:
        # The run's name is part of ids and seeds: what is to be compared has one seed and is compared by prompt.
        manifest.read(file, Flags().expansion(name, "noop"), Columns(), CardDesk(client.settings))
        spec = RunSpec(
            name=name,
            target=storage.url,
            model="noop",
            digest=manifest.digest,
            planned=manifest.planned,
            window=10,
        )
        RunFolder(storage, name).write_plan(spec, manifest.lines())
        RunLedger(connection, client.settings).open(spec)
    storage.close()


def outputs(target: Path) -> dict[str, str]:
    """Prompt and seed -> hash of the picture's pixels, of whatever result.json names."""
    from PIL import Image

    found = {}
    for path in target.glob("*/result.json"):
        (output,) = json.loads(path.read_text())["outputs"]
        picture = (target / output["key"]).read_bytes()
        assert hashlib.sha256(picture).hexdigest() == output["sha256"]
        request = json.loads((target / output["sidecar"]["key"]).read_text())["request"]
        with Image.open(target / output["key"]) as image:
            found[f"{request['prompt']} {request['seed']}"] = hashlib.sha256(image.tobytes()).hexdigest()
    return found


def test_resume_at_a_random_row_20_times(
    client: JobClient, connection: redis.Redis, start_worker: StartWorker, tmp_path: Path
) -> None:
    file, store = tmp_path / "p.jsonl", tmp_path / "store"
    file.write_text("".join(json.dumps({"prompt": f"p{i}", "seed": i}) + "\n" for i in range(ROWS)))
    start_worker().ready("noop")

    def whole(name: str, crashes: int, chance: random.Random) -> Run:
        target = tmp_path / name
        plan(client, connection, file, target, name)
        for _ in range(crashes):
            parts = Parts(client, connection, target, name)
            parts.controller.claim(force=True)
            parts.finisher.left, parts.finisher.late = chance.randrange(ROWS), chance.random() < 0.5
            try:
                drive(parts.controller)
            except Killed:
                pass
            finally:
                parts.close()
        parts = Parts(client, connection, target, name)
        parts.controller.claim(force=True)
        parts.finisher.left = 1 << 30
        run = drive(parts.controller)
        parts.close()
        return run

    whole("calm", 0, random.Random(0))
    expected = outputs(tmp_path / "calm")
    assert len(expected) == ROWS
    for number in range(20):
        run = whole(f"run{number}", 1 + number % 3, random.Random(number))
        assert (run.done, run.settled, run.state) == (ROWS, ROWS, "done")
        assert outputs(tmp_path / f"run{number}") == expected
        records = client.list(run=f"run{number}", limit=1000).records
        assert {record.attempt for record in records} == {1}, "nothing was generated twice"
        assert len(records) == ROWS
    assert store.exists(), "the worker's own store: the runs' targets are others, and results were fetched"
