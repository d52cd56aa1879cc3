"""`saggar run FILE`: a file of prompts from start to pictures, on this machine or on a cluster's queue."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from saggar.engine.models.registry import open_family
from saggar.jobs.cards import Cards, ModelCard, check_job, unknown_model
from saggar.jobs.client import JobClient
from saggar.jobs.errors import ConfigError, SaggarError
from saggar.jobs.schema import Job
from saggar.jobs.settings import JobSettings, connect
from saggar.workers.commands.jobs import job_settings
from saggar.workers.embedded import EmbeddedCluster
from saggar.workers.model_source import fetch_for_people, is_remote
from saggar.workers.runs.follow import Tally, follow_run, progress_line, retry_failed, submit_all
from saggar.workers.runs.manifest import Manifest, parse_settings, read_manifest
from saggar.workers.runs.sheet import SheetFailed, write_sheet
from saggar.workers.settings import DEFAULT_MODEL, public_name

_START_TIMEOUT_S = 600.0


class WorkerEnded(SaggarError):
    """The embedded worker ended while jobs were waiting."""


@dataclass(frozen=True)
class Place:
    """Where a run happens: the queue, the model's public name, and a check that somebody still works."""

    settings: JobSettings
    model: str
    embedded: bool
    alive: Callable[[], None] = lambda: None


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--model",
    help="A diffusers folder, a hub id, s3://bucket/folder or a built-in model.  [default: saggar/emoji]",
)
@click.option("--to", "target", type=click.Path(path_type=Path), default=Path("out"), show_default=True)
@click.option(
    "--set",
    "params",
    multiple=True,
    metavar="NAME=VALUE",
    help="A parameter of every row: --set num_inference_steps=28.",
)
@click.option("--name", help="The run's name.  [default: the file's]")
@click.option(
    "--cluster", is_flag=True, help="Use the cluster's queue of SAGGAR_REDIS_URL instead of this machine."
)
@click.option("--redis", "redis_url", help="The same, with the URL given here.")
@click.option(
    "--data", type=click.Path(path_type=Path), help="Where the embedded queue lives.  [default: TO/.saggar]"
)
@click.option("--max-batch", type=int, help="Most rows of one batch.  [default: 8]")
@click.option("--device", help="auto, cpu, cuda or cuda:N.")
@click.option("--executor", type=click.Choice(["multiproc", "local"]))
@click.option("--sheet/--no-sheet", default=True, help="Write contact-sheet.png at the end.")
def run(
    file: Path,
    model: str | None,
    target: Path,
    params: Sequence[str],
    name: str | None,
    cluster: bool,
    redis_url: str | None,
    data: Path | None,
    sheet: bool,
    **flags: object,
) -> None:
    """Make every picture of FILE: one job a line as JSON, or one prompt a line in a .txt file.

    Without --cluster everything runs here: a private Redis, one worker, and a folder for the pictures. The same command
    again makes only what is missing.
    """
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; give a .jsonl file of jobs or a .txt file of prompts")
    console = Console(stderr=True)
    defaults: dict[str, object] = {"params": parse_settings(params)}
    run_name = name or _run_name(file)
    flags |= {"model": model, "store": str(target), "data": data}
    if cluster and redis_url is None:
        redis_url = JobSettings.from_env().redis_url
    try:
        with _place(redis_url, target, flags) as place, JobClient(place.settings) as client:
            tally = _run(console, client, place, file, defaults, run_name)
            _finish(console, client, run_name, tally)
            if sheet and tally.ends["succeeded"]:
                _show(console, client, run_name, target, place)
    except KeyboardInterrupt:
        went_on = "the same command goes on where it was"
        queued = f"jobs that were queued stay queued: saggar cancel --run {run_name} ends them"
        console.print(f"stopped; {queued if redis_url else went_on}")
        sys.exit(130)
    sys.exit(1 if tally.failed else 0)


def _run_name(file: Path) -> str:
    kept = "".join(char if char.isalnum() or char in "._-" else "-" for char in file.stem)
    return (kept.lstrip("._-") or "run")[:128]


@contextmanager
def _place(redis_url: str | None, target: Path, flags: dict[str, object]) -> Iterator[Place]:
    """A cluster's queue, or everything here. Raises ConfigError for flags that say nothing to a cluster."""
    model = str(flags["model"] or DEFAULT_MODEL)
    data = flags.pop("data")
    if redis_url is not None:
        for name in ("max_batch", "device", "executor"):
            if flags[name] is not None:
                raise ConfigError(f"--{name.replace('_', '-')} is the worker's: it says nothing with --redis")
        if data is not None:
            raise ConfigError("--data is the embedded queue's folder: it says nothing with --redis")
        yield Place(job_settings(redis_url), model, embedded=False)
        return
    if is_remote(model):
        flags |= {"model": fetch_for_people(model), "model_name": public_name(model)}
    open_family(str(flags["model"] or model))  # a wrong name is told before anything starts
    with EmbeddedCluster(Path(str(data)) if data else target / ".saggar", flags) as cluster:

        def alive() -> None:
            if cluster.worker.poll() is not None:
                raise WorkerEnded(f"the worker ended; its log {cluster.log} ends with:\n{cluster.log_tail()}")

        yield Place(cluster.settings.jobs, cluster.settings.name, embedded=True, alive=alive)


def _run(
    console: Console, client: JobClient, place: Place, file: Path, defaults: dict[str, object], name: str
) -> Tally:
    card = _wait_for_card(console, place)
    manifest = read_manifest(file, {"model": place.model, **defaults}, name, _Checker(place.settings, card))
    _refuse_bad(manifest)
    states = submit_all(client, manifest.jobs)
    again = retry_failed(client, states)
    done = sum(state == "succeeded" for state in states.values())
    folded = f", {manifest.folded} repeated rows folded" if manifest.folded else ""
    tried = f", {again} failed ones tried again" if again else ""
    console.print(f"{len(states)} jobs, {done} done before{tried}{folded}; model {card.model}, run {name}")
    with progress_line(console, len(states)) as show:
        tally = follow_run(client, name, states, place.alive, show)
        show(tally)
    return tally


class _Checker:
    """Checks rows against the cards of their models, so that all bad ones are told at once; submit checks again."""

    def __init__(self, settings: JobSettings, card: ModelCard) -> None:
        self._settings = settings
        self._cards: dict[str, ModelCard | None] = {card.model: card}

    def __call__(self, job: Job) -> Job:
        card = self._card(job.model)
        if card is None and not job.allow_unserved:
            raise unknown_model(job.model, [name for name, known in self._cards.items() if known])
        if card is not None:
            check_job(job, card)
        return job

    def _card(self, model: str) -> ModelCard | None:
        if model not in self._cards:
            client = connect(self._settings)
            self._cards[model] = Cards(client, self._settings).get(model)
            client.close()
        return self._cards[model]


def _wait_for_card(console: Console, place: Place) -> ModelCard:
    """A cluster's card is there or not, whoever serves it now; the embedded worker publishes it once it has loaded."""
    client = connect(place.settings)
    try:
        cards = Cards(client, place.settings)
        with console.status(f"loading {place.model} ..."):
            deadline = time.monotonic() + (_START_TIMEOUT_S if place.embedded else 0.0)
            while (card := cards.get(place.model)) is None:
                place.alive()
                if time.monotonic() >= deadline:
                    raise ConfigError(
                        f"no worker ever served {place.model}: start one with saggar worker --model ..."
                    )
                time.sleep(0.1)
        if not place.embedded and not cards.workers_of(place.model):
            console.print(
                f"[yellow]no worker serves {place.model} at this moment: the jobs wait for one[/yellow]"
            )
        return card
    finally:
        client.close()


def _refuse_bad(manifest: Manifest) -> None:
    if manifest.bad:
        raise ConfigError(f"{len(manifest.bad)} bad rows, nothing was queued:\n{manifest.complaint()}")


def _finish(console: Console, client: JobClient, name: str, tally: Tally) -> None:
    ends = ", ".join(f"{count} {state}" for state, count in sorted(tally.ends.items()))
    made = (
        f"; mean batch {tally.mean_batch:.1f}; {tally.rate:.1f} jobs/s"
        if tally.batches
        else "; nothing to make"
    )
    console.print(f"{ends}{made}")
    for record in client.list(run=name, state="failed", limit=3).records if tally.failed else ():
        assert record.error is not None
        console.print(f"[red]{record.id}: {record.error.kind}: {record.error.message}[/red]", highlight=False)


def _show(console: Console, client: JobClient, name: str, target: Path, place: Place) -> None:
    """The contact sheet, and what to do next. A sheet that cannot be made is no reason to call the run a failure."""
    try:
        path = write_sheet(client, name, target / "contact-sheet.png")
    except SheetFailed as error:
        console.print(f"[yellow]no contact sheet: {error}[/yellow]")
        return
    console.print(f"Look at [bold]{path}[/bold]", soft_wrap=True)
    if place.embedded:
        console.print(
            f"The pictures are {target}/ID/a1/0-....png, each with a .json beside it. Try next:",
            soft_wrap=True,
        )
        console.print("  saggar run my-prompts.txt --to out/mine        one prompt a line", highlight=False)
        console.print(
            f"  {f'saggar models inspect {place.model}':<46} what --set can change", highlight=False
        )
        console.print(
            "  README.md, 'A cluster'                         workers in shells of their own", highlight=False
        )
