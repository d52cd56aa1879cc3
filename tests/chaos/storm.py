"""A storm over a site: producers submit while workers, ranks, Redis and S3 are killed at random moments."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import psutil
import redis
from saggar.jobs.client import JobClient
from saggar.jobs.errors import SaggarError
from saggar.jobs.record import JobRecord

from tests.support.cluster import until
from tests.support.site import Site

# What is drawn for each kill of a worker: the Celery process alone, which its supervisor starts anew, or all of it.
WHOLE = 0.5


@dataclass
class Storm:
    """`kills`: how many of each kind. `jobs` are submitted over `spread_s` seconds by two producers."""

    site: Site
    seed: int
    jobs: int
    kills: dict[str, int]
    spread_s: float
    workers: int = 3
    killed: Counter[str] = field(default_factory=Counter)
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.ids = [f"storm-{self.seed}-{number}" for number in range(self.jobs)]

    def run(self, timeout_s: float) -> list[JobRecord]:
        """The records of all jobs once all have ended."""
        for _ in range(self.workers):
            self._start_worker()
        self.site.serving(self.workers, 120)
        producers = [threading.Thread(target=self._produce, args=(part,)) for part in range(2)]
        for producer in producers:
            producer.start()
        self._kill_all()
        for producer in producers:
            producer.join(timeout_s)
            assert not producer.is_alive()
        if self.failure:
            raise self.failure
        return self.site.wait(self.ids, timeout_s)

    def _start_worker(self) -> None:
        flags = ("--max-batch", "4", "--grace", "20")
        self.site.worker(*flags, executor="multiproc", SAGGAR_MAX_RESTARTS="1000")

    def _kill_all(self) -> None:
        events = [kind for kind, count in self.kills.items() for _ in range(count)]
        self.draw.shuffle(events)
        pause = self.spread_s / (len(events) + 1)
        for kind in events:
            time.sleep(self.draw.uniform(0.3, 1.7) * pause)  # the moment of the crash is the experiment
            getattr(self, f"_kill_{kind}")()
            self.killed[kind] += 1

    def _kill_worker(self) -> None:
        living = [worker for worker in self.site.workers if worker.process.poll() is None]
        worker = self.draw.choice(living)
        if self.draw.random() < WHOLE:
            worker.kill()
            self._start_worker()
        else:
            _kill(worker.child())

    def _kill_rank(self) -> None:
        _kill(self.draw.choice(until(self.site.ranks, 60, "a rank to kill")))

    def _kill_redis(self) -> None:
        self.site.redis.kill()
        time.sleep(self.draw.uniform(0, 1))  # how long it is away
        self.site.redis.start()

    def _kill_s3(self) -> None:
        assert self.site.s3
        self.site.s3.kill()
        self.site.s3.start()

    def _produce(self, part: int) -> None:
        """Every second job; submits again what it is not sure of, as a producer with ids of its own may."""
        draw, mine = random.Random(f"{self.seed}-{part}"), range(part, self.jobs, 2)
        try:
            with JobClient(self.site.settings) as client:
                for start in range(0, len(mine), 10):
                    chunk = [job(self.ids, number, draw) for number in mine[start : start + 10]]
                    until(lambda chunk=chunk: submitted(client, chunk), 60, "a submit")
                    time.sleep(self.spread_s * 10 / len(mine))
        except BaseException as error:
            self.failure = error
            raise


def job(ids: list[str], number: int, draw: random.Random) -> dict[str, object]:
    return {
        "id": ids[number],
        "model": "noop",
        "prompt": f"storm {number}",
        "seed": number,
        "num_outputs": draw.choice([1, 1, 1, 2]),
        "priority": draw.choice(["bulk", "bulk", "normal", "interactive"]),
        "params": {"steps": 3, "sleep_s": draw.uniform(0.03, 0.2), "key": draw.choice("abcd")},
    }


def submitted(client: JobClient, chunk: list[dict[str, object]]) -> bool:
    try:
        outcomes = list(client.submit_many(chunk))
    except redis.RedisError:
        return False
    errors = [outcome for outcome in outcomes if isinstance(outcome, SaggarError)]
    assert not errors, errors
    return True


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
