"""A run without workers: a plan in memory, and somebody who ends its jobs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import redis
from saggar.jobs import Cards, Job, JobClient, JobError, Ledger
from saggar.jobs.runs import Controller, Finisher, RunLedger, RunSpec

from tests.jobs.samples import CARD, MODEL, SETTINGS, make_job, make_result

NAME = "cats"


class Rows:
    """A plan of jobs `row-N`."""

    def __init__(self, count: int) -> None:
        self.jobs = [make_job(id=f"row-{n}", prompt=f"p{n}", run=NAME, seed=n) for n in range(count)]

    def rows(self, first: int) -> Iterator[tuple[int, Job]]:
        yield from list(enumerate(self.jobs))[first:]


class Bench:
    """A run of `count` rows over one Redis. `work` ends what waits, as a worker would."""

    def __init__(self, client: redis.Redis, count: int, **spec: object) -> None:
        self.redis = client
        self.plan = Rows(count)
        self.ledger = Ledger(client, SETTINGS)
        self.client = JobClient(SETTINGS, client)
        self.runs = RunLedger(client, SETTINGS)
        self.made: list[str] = []
        Cards(client, SETTINGS).publish(CARD, "worker-1")
        values = {
            "name": NAME,
            "target": "file:///out",
            "model": MODEL,
            "digest": "d1",
            "planned": count,
            **spec,
        }
        self.spec = RunSpec.model_validate(values)
        self.runs.open(self.spec)

    def controller(self, finisher: Finisher | None = None) -> Controller:
        """Another one, that takes the run from whoever has it."""
        controller = Controller(NAME, self.client, self.redis, self.plan, finisher)
        controller.claim(force=True)
        return controller

    def work(self, most: int = 1000, fails: Callable[[str], bool] = lambda _: False) -> int:
        """Ends up to `most` of the waiting jobs, oldest first."""
        page = self.client.list(state="queued", limit=most, newest_first=False)
        for record in page.records:
            self.end(record.id, fails(record.id))
        return len(page.records)

    def end(self, job_id: str, fails: bool = False) -> None:
        put = self.client.status(job_id).put
        attempt = self.ledger.start(job_id, "worker-1", put=put).attempt  # type: ignore[union-attr]
        if fails:
            self.ledger.fail(job_id, attempt, JobError(kind="row_failed", message="asked to"))
        else:
            self.made.append(job_id)
            self.ledger.commit(job_id, attempt, make_result(attempt))

    def finish(self, controller: Controller, fails: Callable[[str], bool] = lambda _: False) -> None:
        """Steps and works until the run stands still."""
        for _ in range(10_000):
            run = controller.step(0)
            if run.state == "done" or (run.state in ("paused", "cancelled") and run.open == 0):
                return
            self.work(fails=fails)
        raise AssertionError(f"the run does not end: {run}")

    def counts(self) -> tuple[int, int, int, int]:
        run = self.runs.get(NAME)
        return run.done, run.failed, run.rejected, run.cancelled


def some(seed: int, share: float) -> Callable[[str], bool]:
    return lambda job_id: random.Random(f"{seed} {job_id}").random() < share


class Crash(Exception):
    """The process is gone."""
