"""A run from its plan to its end over a real Redis, with stores in memory and a worker that is a function.

What it came to is told as `facts`, which are the same whatever happened to its controllers on the way.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import redis
from PIL import Image
from saggar.jobs import Cards, Job, JobClient, JobError, JobSettings, Ledger, OutputRef, connect
from saggar.jobs.ledger.parse import Started
from saggar.jobs.record import JobRecord, JobResult, UnreadText
from saggar.jobs.runs import Controller, LeaseLost, Run, RunLedger, RunSpec
from saggar.storage.errors import StorageUnavailable
from saggar.storage.keys import output_key, result_key, sidecar_key
from saggar.storage.results import ManifestFile, ManifestOutput, ResultManifest, read_result
from saggar.storage.shard_index import read_indexes
from saggar.workers.runs.drive import stands_still
from saggar.workers.runs.finish import RunFinisher, staging
from saggar.workers.runs.folder import RunFolder
from saggar.workers.runs.launch import Flags, register
from saggar.workers.runs.manifest import Manifest
from saggar.workers.runs.outputs import Outputs
from saggar.workers.runs.readers import Columns
from saggar.workers.runs.verify import verify

from tests.jobs.samples import CARD, MODEL
from tests.workers.runs.trap import Killed, MemoryStore, Trap, TrappedRedis

NAME = "r"
_PASSING = re.compile("/(data|index|unread)/")
"""Shards may be others, and whoever slept before he noted a row may note it once more."""
STILL = 60
"""Looks without any news, after which a run does not end."""


@dataclass
class Case:
    """What a run shall do and what happens to it. `rows`: as in a manifest; `fails`: prompts whose jobs fail;
    `loses`: what is taken of a prompt's first pictures before they are packed: "png", "result" or "all"; `happens`:
    called between two steps."""

    rows: Sequence[Mapping[str, object]]
    spec: Mapping[str, object] = field(default_factory=dict)
    fails: frozenset[str] = frozenset()
    loses: Mapping[str, str] = field(default_factory=dict)
    happens: Callable[[World], None] = lambda world: None
    at_home: bool = False
    """Workers write into the run's target."""


def picture(seed: int) -> bytes:
    """A PNG of one grey: dark when its seed is odd or above 1,000."""
    target = io.BytesIO()
    level = 2 if seed % 2 or seed > 1000 else seed * 40 % 200 + 50
    Image.new("RGB", (16, 16), (level, level, level)).save(target, "PNG")
    return target.getvalue()


class World:
    """One Redis, which it empties, and two stores."""

    def __init__(self, case: Case, redis_url: str, folder: Path) -> None:
        self.case = case
        self.settings = JobSettings.make(redis_url=redis_url)
        self.redis = connect(self.settings)
        self.redis.flushall()
        Cards(self.redis, self.settings).publish(CARD, "worker-1")
        self.client = JobClient(self.settings, self.redis)
        self.ledger = Ledger(self.redis, self.settings)
        self.runs = RunLedger(self.redis, self.settings)
        self.target = MemoryStore("target")
        self.store = self.target if case.at_home else MemoryStore("workers")
        self.made: Counter[str] = Counter()
        self.hurt: set[str] = set()
        self.held: list[tuple[JobRecord, Started | None]] = []
        self.done: set[str] = set()
        """What `happens` has done."""
        self._folder = folder
        self._connections: list[redis.Redis] = []

    def close(self) -> None:
        for connection in [self.redis, *self._connections]:
            connection.close()

    # -- whoever starts it

    def start(
        self, rows: Sequence[Mapping[str, object]], trap: Trap | None = None, *, extend: bool = False
    ) -> Run:
        """As `saggar run --detach` of these rows."""
        file = self._folder / f"{len(rows)}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        connection, target = self._trapped(trap or Trap())
        shards = self.case.spec.get("format", "objects") != "objects"
        prefix = staging(NAME) if shards else ""
        with Manifest() as manifest:
            expansion = Flags().expansion(NAME, MODEL, prefix)
            manifest.read(file, expansion, Columns(), lambda job: CARD)
            values = {
                "name": NAME,
                "target": target.url,
                "model": MODEL,
                "digest": manifest.digest,
                "planned": manifest.planned,
                "prefix": prefix,
                "detached": True,
                "window": 4,
                "sheet": False,
                **self.case.spec,
            }
            spec = RunSpec.model_validate(values)
            ledger = RunLedger(connection, self.settings)
            return register(ledger, RunFolder(target, NAME), manifest, spec, extend=extend)

    def _trapped(self, trap: Trap) -> tuple[redis.Redis, MemoryStore]:
        connection = TrappedRedis.from_url(self.settings.redis_url, decode_responses=True)
        connection.trap = trap
        self._connections.append(connection)
        return connection, self.target.trapped(trap)

    # -- whoever controls it

    def live(self, trap: Trap | None = None, most: int = 100_000) -> Run | None:
        """A controller takes the run and goes on until it stands still, or for so many steps; None: it was killed."""
        trap = trap or Trap()
        connection, target = self._trapped(trap)
        store = target if self.case.at_home else self.store.trapped(trap)
        finisher: RunFinisher | None = None
        try:
            client = JobClient(self.settings, connection)
            folder = RunFolder(target, NAME)
            controller = Controller(NAME, client, connection, folder)
            outputs = Outputs(lambda root: {"memory://target": target, "memory://workers": store}[root])
            finisher = RunFinisher(self.runs.get(NAME).spec, client, controller, target, folder, outputs)
            controller.finisher = finisher
            controller.claim(force=True)
            run = self._steps(controller, most)
            controller.runs.release(NAME, controller.token)
            return run
        except Killed:
            return None
        except (
            redis.ConnectionError,
            StorageUnavailable,
        ):  # amid its start or end: its command ends with a line
            return None
        finally:
            if finisher is not None:
                finisher.close()

    def finish(self, trap: Trap | None = None) -> None:
        """One controller after the other, until nothing is left to do."""
        trap = trap or Trap()
        for _ in range(10):
            run = self.live(trap)
            self.redis.delete(f"saggar:runs:{NAME}:lease")  # of one that was killed it ends by itself
            trap = Trap() if trap.sprung else trap
            self.check_done()
            self.case.happens(self)
            if run is not None and stands_still(self.runs.get(NAME)) and run.state in ("done", "cancelled"):
                return
        raise AssertionError(f"the run does not end: {self._pulse()}")

    def _steps(self, controller: Controller, most: int) -> Run:
        seen, still = "", 0
        for _ in range(most):
            try:
                run = controller.step(0)
            except (redis.ConnectionError, StorageUnavailable):
                controller.resync()
            except LeaseLost:
                controller.lost()
                self.redis.delete(f"saggar:runs:{NAME}:lease")  # whoever took it gives it back
            else:
                self.check_done()
                if stands_still(run):
                    return run
            self.work()
            self.case.happens(self)
            now = self._pulse()
            seen, still = now, still + 1 if now == seen else 0
            assert still < STILL, f"the run does not end: {now}"
        return self.runs.get(NAME)

    # -- whoever works

    def work(self, most: int = 3) -> None:
        """Ends up to so many of the waiting jobs, oldest first."""
        for record in self.client.list(state="queued", limit=most, newest_first=False).records:
            self.end(record)

    def begin(self, record: JobRecord) -> Started | None:
        begun = self.ledger.start(record.id, "worker-1", put=record.put)
        return begun if isinstance(begun, Started) else None

    def end(self, record: JobRecord, begun: Started | None = None) -> None:
        begun = begun or self.begin(record)
        if begun is None:
            return
        if record.job.prompt in self.case.fails and "again" not in self.done:
            self.ledger.fail(record.id, begun.attempt, JobError(kind="row_failed", message="asked to"))
            return
        self.ledger.commit(record.id, begun.attempt, self._result(record.job, begun.attempt))
        if (part := self.case.loses.get(record.job.prompt)) and record.job.prompt not in self.hurt:
            self.hurt.add(record.job.prompt)
            self._hurt(record.job, part)

    def _result(self, job: Job, attempt: int) -> JobResult:
        """What stands already, or what is drawn."""
        key = result_key(job.output.prefix, job.id)
        if key not in self.store.objects:
            self.made[job.id] += 1
            outputs = [self._draw(job, attempt, index) for index in range(job.num_outputs)]
            manifest = ResultManifest(
                job_id=job.id,
                attempt=attempt,
                spec_sha256="0" * 64,
                model=job.model,
                created=datetime.now(UTC),
                outputs=tuple(outputs),
                batch_size=2,
            )
            self.store.put(key, manifest.to_bytes(), content_type="application/json")
        found = read_result(self.store, key)
        refs = [
            OutputRef(
                index=one.index,
                uri=self.store.uri(one.key),
                sha256=one.sha256,
                bytes=one.size,
                content_type=one.content_type,
                seed=one.seed or 0,
            )
            for one in found.outputs
        ]
        unread = (
            (UnreadText(field="prompt", read_tokens=1, tokens=2),) if job.prompt.endswith("long") else None
        )
        return JobResult(
            outputs=refs, manifest=self.store.uri(key), attempt=found.attempt, batch_size=2, unread=unread
        )

    def _draw(self, job: Job, attempt: int, index: int) -> ManifestOutput:
        data, side = picture((job.seed or 0) + index), b"{}"
        sha256 = hashlib.sha256(data).hexdigest()
        place = (job.output.prefix, job.id, attempt, index, sha256)
        self.store.put(output_key(*place, "png"), data, content_type="image/png")
        self.store.put(sidecar_key(*place), side, content_type="application/json")
        sidecar = ManifestFile(
            key=sidecar_key(*place),
            sha256=hashlib.sha256(side).hexdigest(),
            size=len(side),
            content_type="application/json",
        )
        return ManifestOutput(
            key=output_key(*place, "png"),
            sha256=sha256,
            size=len(data),
            content_type="image/png",
            index=index,
            seed=(job.seed or 0) + index,
            sidecar=sidecar,
        )

    def _hurt(self, job: Job, part: str) -> None:
        base = result_key(job.output.prefix, job.id).removesuffix("result.json")
        ends = {"png": ".png", "result": "result.json", "all": ""}[part]
        for key in [k for k in self.store.objects if k.startswith(base) and k.endswith(ends)]:
            del self.store.objects[key]

    # -- what it came to

    def check_done(self) -> None:
        """A run is never done without what says so."""
        run = self.runs.get(NAME)
        if run.state == "done":
            assert run.complete
            assert f"_runs/{NAME}/_SUCCESS" in self.target.objects, "done, and nothing says so"
            assert f"_runs/{NAME}/report.json" in self.target.objects
            if run.spec.format != "objects":
                assert f"{NAME}/_SUCCESS" in self.target.objects or not run.done

    def _pulse(self) -> str:
        run = self.runs.get(NAME)
        counts = (
            run.state,
            run.done,
            run.failed,
            run.rejected,
            run.cancelled,
            run.open,
            run.cursor,
            run.redrawn,
        )
        return repr((counts, self.runs.rows(NAME, 0, run.planned), self.made, self.done))

    def facts(self) -> dict[str, object]:
        run = self.runs.get(NAME)
        counts = ("state", "planned", "done", "failed", "rejected", "cancelled", "redrawn", "open")
        sums = ("pictures", "bytes", "batched")
        records = [
            record
            for state in ("queued", "running", "succeeded", "failed", "cancelled")
            for record in self.client.list(run=NAME, state=state, limit=1000).records  # type: ignore[arg-type]
        ]
        return {
            **{name: getattr(run, name) for name in (*counts, *sums)},
            "batches": round(run.batches, 6),
            "tallies": self.runs.tallies(NAME),
            "failures": self.runs.failures(NAME),
            "pace": sum(count for _, count in self.runs.pace(NAME)),
            "rows": self.runs.rows(NAME, 0, run.planned),
            "made": dict(sorted(self.made.items())),
            "records": sorted((record.id, record.state) for record in records),
            "packed": sorted(row for index in read_indexes(self.target, NAME) for row in index.rows),
            "store": sorted(key for key in self.store.objects if "/objects/" in key),
            "target": sorted(k for k in self.target.objects if not _PASSING.search(k)),
            "accepted": self.target.objects.get(f"_runs/{NAME}/accepted.jsonl"),
            "findings": verify(self.target).findings if run.state == "done" else [],
        }


def losses(records: Sequence[logging.LogRecord]) -> int:
    """Rows that were said to be lost."""
    said = re.compile(r"pictures of (\d+) rows are lost|what row \d+ made is lost")
    found = (said.search(one.getMessage()) for one in records)
    return sum(int(one[1] or 1) for one in found if one)
