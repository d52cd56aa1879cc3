"""Real pictures into shards on a real S3 server, while everything is killed in turn: each row once, and verified."""

from __future__ import annotations

import json
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from saggar.jobs.runs import Run, RunLedger
from saggar.jobs.runs.controller import KEPT
from saggar.storage.base import Storage, open_storage
from saggar.workers.runs.folder import RunFolder

from tests.support.cluster import WorkerProcess, until
from tests.support.site import Site, freeze
from tests.support.weed import S3Server
from tests.workers.runs.support import is_clean, manifest, packed, start

pytestmark = pytest.mark.e2e
NAME = "storm"


class Storm:
    """A run of `rows` rows on a site; what happens to it."""

    def __init__(self, site: Site, rows: int, shard: int) -> None:
        self.site, self.rows = site, rows
        self.target = f"s3://{site.s3.bucket}/{site.mark}-out" if site.s3 else ""
        self.file = manifest(
            site.folder / "p.jsonl", [{"prompt": f"a red apple, number {i}", "seed": i} for i in range(rows)]
        )
        self.command = (
            "run", self.file, "--name", NAME, "--redis", site.redis.url, "--model", "saggar/emoji",
            "--to", self.target, "--set", "num_inference_steps=8", "--format", "webdataset",
            "--shard-count", shard, "--window", "48",
        )  # fmt: skip
        self.runs = RunLedger(site.server, site.settings)
        self.in_hand: Counter[str] = Counter()
        """By job, how often it was in the hands of a worker at its death."""

    def worker(self) -> WorkerProcess:
        site = self.site
        log = site.folder / f"worker{len(site.workers)}.log"
        flags = ("--executor", "local")
        worker = WorkerProcess(site.redis.url, site.store, "saggar/emoji", log, flags, site.environ).start()
        site.workers.append(worker)
        return worker

    def client(self) -> subprocess.Popen[bytes]:
        environ = self.site.environ | {"SAGGAR_RUN_LEASE_S": "3"}
        client = start(*self.command, environ=environ, log=self.site.folder / "client.log")
        self.site.alone.append(client)
        return client

    def standing(self) -> Run | None:
        """None while Redis is away or the run unknown."""
        from saggar.jobs.errors import UnknownRun

        try:
            return self.runs.get(NAME)
        except (redis.RedisError, UnknownRun):
            return None

    def until(self, condition: Callable[[Run], bool], what: str, client: subprocess.Popen[bytes]) -> Run:
        """Fails at once when the client ends early."""

        def look() -> Run | None:
            assert client.poll() is None, (self.site.folder / "client.log").read_text()[-3000:]
            run = self.standing()
            return run if run is not None and condition(run) else None

        found = until(look, 240, what)
        assert found is not None
        return found

    def kill(self, worker: WorkerProcess, client: subprocess.Popen[bytes]) -> None:
        """SIGKILL of a worker's whole family, with jobs in its hands. It stands still while they are counted: what it
        had sent before, Redis may hear a moment later."""
        self.until(lambda run: run.complete or bool(self._held(worker)), "a worker with work", client)
        freeze(worker.child())
        held = self._held(worker)
        while (again := self._held(worker)) != held:
            held = again
        self.in_hand.update(held)
        worker.kill()

    def _held(self, worker: WorkerProcess) -> set[str]:
        running = self.site.client.list(run=NAME, state="running", limit=1000).records
        return {record.id for record in running if worker.has(record)}


def storm(site: Site, rows: int, shard: int) -> None:
    """The client, the packer in the middle of its work, each worker, the S3 server, and Redis."""
    assert site.s3 is not None
    it = Storm(site, rows, shard)
    first, second = it.worker(), it.worker()
    first.ready("saggar/emoji", workers=2, timeout_s=120)
    client = it.client()
    it.until(lambda run: run.done >= rows // 10, "the first tenth", client)
    client.send_signal(signal.SIGKILL)
    client.wait(10)

    client = it.client()
    it.until(lambda _: "p" in it.runs.rows(NAME, 0, rows), "the first shard", client)
    it.until(lambda _: "d" in it.runs.rows(NAME, 0, rows), "a shard in the making", client)
    client.send_signal(signal.SIGKILL)
    client.wait(10)

    client = it.client()
    done = it.until(lambda run: run.held, "a controller", client).done
    it.until(lambda run: run.done >= min(rows, done + rows // 10), "more rows", client)
    it.kill(first, client)
    it.worker()
    done = it.until(lambda run: run.done >= done + 1, "more rows", client).done
    site.s3.kill()
    site.s3.start()
    site.redis.kill()
    site.redis.start()
    it.until(lambda run: run.done > done or run.complete, "more rows after both servers came back", client)
    it.kill(second, client)
    it.worker()
    assert client.wait(400) == 0, (site.folder / "client.log").read_text()[-3000:]
    check(it)


def check(it: Storm) -> None:
    """Every row once; nothing made twice but what a worker had in hand when it died; everything stored is whole."""
    run = it.standing()
    assert run is not None
    assert (run.state, run.done, run.settled) == ("done", it.rows, it.rows)
    assert it.site.s3 is not None
    storage = _open(it.site, it.target)
    planned = [job.id for _, job in RunFolder(storage, NAME).rows(0)]
    assert len(planned) == it.rows
    keys = packed(storage, NAME)
    assert len(keys) == len(set(keys))
    assert set(keys) == set(planned)
    assert is_clean(storage)
    assert json.loads(storage.get(f"_runs/{NAME}/_SUCCESS"))["done"] == it.rows
    records = it.site.client.list(run=NAME, state="succeeded", limit=1000).records
    assert len(records) == min(it.rows, KEPT)  # of longer runs, those that ended last
    made = {record.id: record.result.attempt for record in records if record.result is not None}
    again = {job_id for job_id, attempt in made.items() if attempt > 1}
    held = it.in_hand.total()
    print(
        f"{len(made)} rows: {len(again)} were taken up again, {held} were in the hands of a worker that died"
    )
    # Whoever takes up a job that was executing puts it aside for a moment first: an attempt in which nothing is made.
    assert [job_id for job_id in again if made[job_id] > 1 + 2 * it.in_hand[job_id]] == []
    storage.close()


def _open(site: Site, target: str) -> Storage:
    site.open_store().close()  # its credentials are in the environment now
    return open_storage(target)


def test_120_rows_in_a_storm(tmp_path: Path, s3_server: S3Server) -> None:
    with Site(tmp_path, s3=s3_server, lease_s=10.0) as site:
        storm(site, 120, 16)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rows", [500, 2000])
def test_many_rows_in_a_storm(tmp_path: Path, s3_server: S3Server, rows: int) -> None:
    with Site(tmp_path, s3=s3_server, lease_s=10.0) as site:
        storm(site, rows, 48)
