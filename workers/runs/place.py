"""Where a run happens: everything on this machine, or a cluster's queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from saggar.engine.models.registry import open_family
from saggar.jobs.cards import Cards, ModelCard, unknown_model
from saggar.jobs.errors import ConfigError, SaggarError
from saggar.jobs.schema import Job
from saggar.jobs.settings import JobSettings, connect
from saggar.workers.commands.jobs import job_settings
from saggar.workers.embedded import EmbeddedCluster
from saggar.workers.model_source import is_remote, model_for_people
from saggar.workers.settings import DEFAULT_MODEL, public_name

_START_TIMEOUT_S = 600.0
_OF_WORKERS = ("max_batch", "device", "executor", "calibration_file", "warmup")


class WorkerEnded(SaggarError):
    """The embedded worker ended while jobs were waiting."""


@dataclass(frozen=True)
class Place:
    """The queue, the default model's public name, and a check that somebody still works."""

    settings: JobSettings
    model: str
    embedded: bool
    alive: Callable[[], None] = lambda: None


@contextmanager
def open_place(
    redis_url: str | None, target: str, model: str | None, data: Path | None, worker: Mapping[str, object]
) -> Iterator[Place]:
    """A cluster's queue (`redis_url`), or an embedded one whose worker writes into `target`. `worker`: flags of the
    embedded worker. Raises ConfigError for flags that say nothing to a cluster, and what the engine says of a model.
    """
    name = model or DEFAULT_MODEL
    if redis_url is not None:
        for flag in _OF_WORKERS:
            if worker.get(flag) is not None:
                raise ConfigError(
                    f"--{flag.replace('_', '-')} is the worker's: it says nothing with --cluster"
                )
        if data is not None:
            raise ConfigError("--data is the embedded queue's folder: it says nothing with --cluster")
        yield Place(job_settings(redis_url), name, embedded=False)
        return
    with ExitStack() as stack:
        flags = {**worker, "model": model, "store": target}
        if is_remote(name):
            here = stack.enter_context(model_for_people(name))
            flags |= {"model": here, "model_name": public_name(name)}
        open_family(str(flags["model"] or name))  # a wrong name is told before anything starts
        cluster = stack.enter_context(EmbeddedCluster(data or _data_folder(target), flags))

        def alive() -> None:
            cluster.redis.check()
            if cluster.worker.poll() is not None:
                raise WorkerEnded(f"the worker ended (its log is {cluster.log}): {cluster.last_words()}")

        yield Place(cluster.settings.jobs, cluster.settings.name, embedded=True, alive=alive)


def _data_folder(target: str) -> Path:
    """Beside the pictures; for a bucket, under the working directory and by the bucket's name."""
    if "://" in target and not target.startswith("file://"):
        return Path("saggar-data") / "".join(c if c.isalnum() or c in "._-" else "-" for c in target)
    return Path(target.removeprefix("file://")) / ".saggar"


class CardDesk:
    """The cards of a place's models, each asked for once: what a plan is checked against."""

    def __init__(self, settings: JobSettings) -> None:
        self._settings = settings
        self._cards: dict[str, ModelCard | None] = {}

    def __call__(self, job: Job) -> ModelCard | None:
        """As CardOf. Raises UnknownModel."""
        card = self.get(job.model)
        if card is None and not job.allow_unserved:
            raise unknown_model(job.model, [name for name, known in self._cards.items() if known])
        return card

    def get(self, model: str) -> ModelCard | None:
        """Raises InvalidCard."""
        if model not in self._cards:
            client = connect(self._settings)
            try:
                self._cards[model] = Cards(client, self._settings).get(model)
            finally:
                client.close()
        return self._cards[model]

    def wait_for(self, console: Console, place: Place) -> ModelCard:
        """A cluster's card is there or not, whoever serves it now; the embedded worker publishes it once it has
        loaded. Raises ConfigError."""
        client = connect(place.settings)
        try:
            cards = Cards(client, place.settings)
            with console.status(f"loading {place.model} ..."):
                deadline = time.monotonic() + (_START_TIMEOUT_S if place.embedded else 0.0)
                while (card := cards.get(place.model)) is None:
                    place.alive()
                    if time.monotonic() >= deadline:
                        raise ConfigError(
                            f"no worker ever served {' '.join(place.model.split())}: start one with "
                            "saggar worker --model ..."
                        )
                    time.sleep(0.1)
            if not place.embedded and not cards.workers_of(place.model):
                console.print(
                    f"[yellow]no worker serves {place.model} at this moment: the jobs wait for one[/yellow]"
                )
        finally:
            client.close()
        self._cards[place.model] = card
        return card
