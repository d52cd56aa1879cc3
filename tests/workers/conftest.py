"""A cluster of real processes over the family without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from saggar.engine.models.registry import open_family
from saggar.jobs.cards import Cards, ModelCard
from saggar.jobs.client import JobClient
from saggar.jobs.settings import connect
from saggar.workers.runs.manifest import Manifest
from saggar.workers.translate import to_card

from tests.support.cluster import WorkerProcess, noop_model

StartWorker = Callable[..., WorkerProcess]


@pytest.fixture
def noop(tmp_path: Path) -> Path:
    return noop_model(tmp_path / "noop")


@pytest.fixture
def manifest() -> Iterator[Manifest]:
    with Manifest() as manifest:
        yield manifest


@pytest.fixture
def client(redis_url: str) -> Iterator[JobClient]:
    with JobClient(redis_url) as client:
        yield client


@pytest.fixture
def noop_card(client: JobClient, noop: Path) -> ModelCard:
    """The card that a worker of `noop` would publish, published: jobs can be queued before one runs."""
    card = to_card(open_family(str(noop)).info("noop", 8, ""), "noop", 8)
    connection = connect(client.settings)
    Cards(connection, client.settings).publish(card, "nobody")
    Cards(connection, client.settings).leave("noop", "nobody")
    connection.close()
    return card


@pytest.fixture
def start_worker(redis_url: str, tmp_path: Path, noop: Path) -> Iterator[StartWorker]:
    """Starts workers of the model `noop` that write into `tmp_path/store`; they end with the test."""
    started: list[WorkerProcess] = []

    def start(
        *flags: str, store: str | None = None, environ: dict[str, str] | None = None, model: str | None = None
    ) -> WorkerProcess:
        worker = WorkerProcess(
            redis_url,
            store or str(tmp_path / "store"),
            str(noop) if model is None else model,
            tmp_path / f"worker{len(started)}.log",
            ("--executor", "local", "--spool", str(tmp_path / "spool"), *flags),
            environ or {},
        )
        started.append(worker)
        return worker.start()

    yield start
    for worker in started:
        worker.__exit__()
