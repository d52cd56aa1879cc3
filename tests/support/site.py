"""A whole deployment of a test's own: Redis, a store, workers that may be killed; and what must hold after."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import psutil
import redis
from PIL import Image
from saggar.engine.models.noop import colour
from saggar.engine.models.registry import open_family
from saggar.jobs.cards import Cards
from saggar.jobs.client import JobClient
from saggar.jobs.events import Event
from saggar.jobs.lanes import LaneStore, lane_name
from saggar.jobs.record import JobRecord
from saggar.jobs.settings import JobSettings, connect
from saggar.storage.base import Storage, open_storage
from saggar.storage.keys import RESULT_NAME
from saggar.storage.results import read_result, verify_result
from saggar.workers.servers import Kind, RedisServer
from saggar.workers.settings import HANDED_ON, WorkerSettings
from saggar.workers.translate import to_card

from tests.support.cluster import WorkerProcess, noop_model, until
from tests.support.faulty_s3 import FaultyS3
from tests.support.memory import named_segments
from tests.support.weed import S3Server

ROOT = Path(__file__).parents[2]
LANE = lane_name("noop")
MARK = "SAGGAR_TEST_SITE"  # stands in the environment of every process that a site has started


@dataclass
class Site:
    """`with Site(folder) as site`: its store is a folder, or an S3 server's bucket when one is given; its Redis is of
    the kind that is asked for.
    """

    folder: Path
    s3: S3Server | FaultyS3 | None = None
    lease_s: float = 2.0
    kind: Kind = "valkey"
    workers: list[WorkerProcess] = field(default_factory=list)
    alone: list[subprocess.Popen[bytes]] = field(default_factory=list)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        self.shared_memory = named_segments()
        self.redis = self._stack.enter_context(RedisServer(self.folder / "redis", kind=self.kind))
        self.settings = JobSettings(redis_url=self.redis.url)
        self.client = self._stack.enter_context(JobClient(self.settings))
        self.server = connect(self.settings)
        self._stack.callback(self.server.close)
        self.lane = LaneStore(self.server, self.settings.key_prefix)
        self.noop = noop_model(self.folder / "noop")
        self._publish_card()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes():
            process.kill()
        for worker in self.workers:
            worker.process.wait(20)
        for child in self.alone:
            child.wait(20)
        self._stack.close()

    # -- what runs

    @property
    def store(self) -> str:
        return f"s3://{self.s3.bucket}/{self.mark}" if self.s3 else str(self.folder / "store")

    @property
    def environ(self) -> dict[str, str]:
        return {
            MARK: self.mark,
            "SAGGAR_LEASE_S": str(self.lease_s),
            "SAGGAR_SPOOL": str(self.folder / "spool"),
            **(self.s3.env if self.s3 else {}),
        }

    def worker(self, *flags: str, executor: str = "local", **environ: str) -> WorkerProcess:
        """`saggar worker`, started and not waited for."""
        flags = ("--executor", executor, *flags)
        log = self.folder / f"worker{len(self.workers)}.log"
        worker = WorkerProcess(
            self.redis.url, self.store, str(self.noop), log, flags, self.environ | environ
        ).start()
        self.workers.append(worker)
        return worker

    def serving(self, count: int, timeout_s: float = 60) -> None:
        """Waits until `count` living workers have said that they serve."""
        cards = Cards(self.server, self.settings)

        def serve() -> bool:
            pids = {process.pid for process in self.processes()}
            owners = cards.workers_of("noop")
            return sum(int(owner.split(":")[1]) in pids for owner in owners) >= count

        until(serve, timeout_s, f"{count} workers serving")

    def sabotaged(self, how: str, **flags: object) -> subprocess.Popen[bytes]:
        """A worker without a supervisor that does to itself what tests/chaos/sabotage.py calls `how`."""
        values = {
            "model": str(self.noop),
            "store": self.store,
            "executor": "local",
            "redis_url": self.redis.url,
            "lease_s": self.lease_s,
            "spool": self.folder / "spool",
            **flags,
        }
        settings = WorkerSettings.load(values, environ={})
        with (self.folder / f"alone{len(self.alone)}.log").open("ab") as sink:
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.sabotage", how],
                env=os.environ | self.environ | {HANDED_ON: settings.handed_on},
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        self.alone.append(child)
        return child

    def processes(self) -> list[psutil.Process]:
        """All of this site's that live: supervisors, workers, ranks."""
        return [process for process in psutil.process_iter() if self._ours(process)]

    def ranks(self) -> list[psutil.Process]:
        return [p for p in self.processes() if "saggar.engine.worker.process" in _line(p)]

    def children(self) -> list[psutil.Process]:
        """The Celery workers."""
        return [p for p in self.processes() if "saggar.workers.lifecycle" in _line(p)]

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))

    # -- jobs

    def submit(self, count: int, *, first: int = 0, **job: object) -> list[str]:
        """Jobs whose pictures `check` knows; under fixed ids, so that submitting again changes nothing."""
        jobs = [
            {
                "model": "noop",
                "id": f"job-{self.mark[:8]}-{number}",
                "prompt": f"p{number}",
                "seed": number,
                **job,
            }
            for number in range(first, first + count)
        ]
        outcomes = list(self.client.submit_many(jobs))
        for outcome in outcomes:
            assert not isinstance(outcome, Exception), outcome
        return [str(job["id"]) for job in jobs]

    def wait(self, ids: Iterable[str], timeout_s: float = 60) -> list[JobRecord]:
        """Their records once all have ended; bears a Redis that is away now and then."""

        def ended() -> bool:
            try:
                return all(self.client.status(job_id).ended for job_id in left)
            except redis.RedisError:
                return False

        left = list(ids)
        until(ended, timeout_s, "the end of all jobs")
        return [self.client.status(job_id) for job_id in left]

    def states(self) -> dict[str, int]:
        return {state: count for state, count in self.client.counts().items() if count}

    def terminal(self, job_id: str) -> list[Event]:
        return [event for event in self.client.events(job_id, follow=False) if event.ended]

    # -- what must hold

    def check(self, records: Iterable[JobRecord]) -> None:
        """Each has succeeded, has one terminal event, and its pictures are the right ones, whole."""
        storage = self.open_store()
        for record in records:
            assert record.state == "succeeded", (record.id, record.state, record.error)
            kinds = Counter(event.kind for event in self.terminal(record.id))
            assert kinds == {"succeeded": 1}, (record.id, kinds)
            self.check_result(storage, record)
        storage.close()

    def check_result(self, storage: Storage, record: JobRecord) -> None:
        result = record.result
        assert result is not None and result.manifest is not None
        manifest = read_result(storage, f"{record.id}/{RESULT_NAME}")
        assert (manifest.attempt, len(manifest.outputs)) == (result.attempt, len(result.outputs))
        verify_result(storage, manifest)
        assert record.job.seed is not None
        for output, ref in zip(manifest.outputs, result.outputs, strict=True):
            data = storage.get(output.key)
            assert hashlib.sha256(data).hexdigest() == ref.sha256
            assert urlsplit(ref.uri).path.endswith(output.key)
            with Image.open(io.BytesIO(data)) as picture:
                wanted = colour(record.job.prompt, record.job.seed + ref.index)
                assert picture.convert("RGB").getpixel((0, 0)) == tuple(map(int, wanted))

    def open_store(self) -> Storage:
        if self.s3:
            os.environ.update(self.s3.env)
        storage = open_storage(self.store)
        storage.probe()
        return storage

    def lanes_are_empty(self, timeout_s: float = 30) -> None:
        """No message, no lease, no holder is left."""
        until(lambda: not any(vars_of(self.lane.size(LANE))), timeout_s, "an empty lane")
        base = self.lane.base(LANE)
        left = [
            key
            for key in self.server.scan_iter(f"{base}:*")
            if not key.endswith((":cfg", ":s", ":h", ":u", ":p")) and ":t:" not in key
        ]
        assert left == []

    def nothing_is_left(self) -> None:
        """After all workers were told to end: no process, no shared memory, nothing in the lanes."""
        self.lanes_are_empty()
        for worker in self.workers:
            if worker.process.poll() is None:
                assert worker.terminate() == 0, worker.log.read_text()[-3000:]
        until(lambda: not self.processes(), 30, "the end of all processes")
        until(lambda: not self._orphaned_memory(), 30, "the end of all shared memory")

    # -- inside

    def _publish_card(self) -> None:
        cards = Cards(self.server, self.settings)
        cards.publish(to_card(open_family(str(self.noop)).info("noop", 8, ""), "noop", 8), "nobody:0:")
        cards.leave("noop", "nobody:0:")

    def _orphaned_memory(self) -> set[str]:
        """New shared memory that no living process maps: other tests and programs have theirs at the same time."""
        new = named_segments() - self.shared_memory
        return {name for name in new if not any(f"/dev/shm/{name}" in text for text in _memory_maps())}

    def _ours(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


def _memory_maps() -> Iterator[str]:
    for pid in psutil.pids():
        try:
            yield Path(f"/proc/{pid}/maps").read_text()
        except OSError:  # it has just ended, or is not ours to read
            continue


def vars_of(size: object) -> Iterator[int]:
    return (getattr(size, name) for name in ("waiting", "delayed", "leased", "dead"))


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def freeze(process: psutil.Process | subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)


def thaw(process: psutil.Process | subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
