"""`saggar submit, watch, status, list, cancel, retry`: a producer's commands. They need Redis, and the store for local
files that a job starts from.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TypeVar, cast, get_args

import click
from saggar.jobs.cards import Cards
from saggar.jobs.client import JobClient
from saggar.jobs.errors import JobFailed, SaggarError, UnknownRun
from saggar.jobs.events import Event
from saggar.jobs.lanes.message import Priority
from saggar.jobs.record import OPEN, JobRecord, State, UnreadText
from saggar.jobs.runs import RunLedger
from saggar.jobs.runs.listing import records_of
from saggar.jobs.runs.plan import parse_settings
from saggar.jobs.schema import Format
from saggar.jobs.settings import JobSettings, connect

F = TypeVar("F", bound=Callable[..., object])


def redis_option(command: F) -> F:
    """`--redis URL`, or SAGGAR_REDIS_URL, or localhost."""
    return click.option(
        "--redis", "redis_url", help="redis://, rediss:// or unix:// URL.  [env: SAGGAR_REDIS_URL]"
    )(command)


def job_settings(redis_url: str | None) -> JobSettings:
    """The environment's settings, with another URL if one is given. Raises ConfigError."""
    flags = {} if redis_url is None else {"redis_url": ("--redis", redis_url)}
    return JobSettings.from_env(flags=flags)


def open_client(redis_url: str | None) -> JobClient:
    """A client by these settings. Raises ConfigError."""
    return JobClient(job_settings(redis_url))


@click.command()
@click.argument("prompt")
@click.option("--model", required=True, help="A served model; `saggar models served` lists them.")
@click.option("--task", help="A task of the model, such as i2i.  [default: t2i]")
@click.option("--negative-prompt")
@click.option("--seed", type=int, help="Of the first output.  [default: a random one]")
@click.option("-n", "--num-outputs", type=int, default=1, show_default=True)
@click.option(
    "--set",
    "params",
    multiple=True,
    metavar="NAME=VALUE",
    help="A parameter of the model: --set num_inference_steps=28.",
)
@click.option("--format", "format_", type=click.Choice(get_args(Format)), help="[default: the model's first]")
@click.option(
    "--image", multiple=True, metavar="FILE", help="A picture to start from: a local file or a URI."
)
@click.option("--mask", multiple=True, metavar="FILE", help="A mask, likewise.")
@click.option("--audio", multiple=True, metavar="FILE", help="A sound, likewise.")
@click.option("--video", multiple=True, metavar="FILE", help="A video, likewise.")
@click.option(
    "--store", help="The workers' store, to which local files are uploaded first.  [env: SAGGAR_STORE]"
)
@click.option("--priority", type=click.Choice(get_args(Priority)), default="normal", show_default=True)
@click.option("--tag", "tags", multiple=True, callback=lambda _ctx, _option, value: list(value))
@click.option("--id", "job_id", help="Submitting an id twice queues one job.")
@click.option("--wait", is_flag=True, help="Wait for the result and print where it is.")
@redis_option
def submit(
    prompt: str,
    redis_url: str | None,
    params: Sequence[str],
    job_id: str | None,
    wait: bool,
    store: str | None,
    image: Sequence[str],
    mask: Sequence[str],
    audio: Sequence[str],
    video: Sequence[str],
    **fields: object,
) -> None:
    """Queue one job for PROMPT and print its id.

    Local files of --image, --mask, --audio and --video are uploaded under uploads/ of the workers' store.
    """
    job: dict[str, object] = {"prompt": prompt, "params": parse_settings(params)}
    if format_ := fields.pop("format_"):
        job["output"] = {"format": format_}
    job |= {"id": job_id} if job_id else {}
    given = {"image": image, "mask": mask, "audio": audio, "video": video}
    if any(given.values()):
        job["inputs"] = _input_uris(given, store)
    job |= {name: value for name, value in fields.items() if value is not None}
    with open_client(redis_url) as client:
        submitted = client.submit(job)
        click.echo(submitted.id)
        if wait:
            _warn_without_workers(client, str(job["model"]))
            result = client.result(submitted.id)
            for output in result.outputs:
                click.echo(output.uri)
            for unread in result.unread or ():
                click.echo(told(unread), err=True)


def _input_uris(given: Mapping[str, Sequence[str]], store: str | None) -> dict[str, list[str]]:
    """URIs by kind; local files are uploaded. Raises ConfigError, StorageError."""
    if all("://" in value for values in given.values() for value in values):
        return {kind: list(values) for kind, values in given.items() if values}
    from saggar.workers.uploads import uri_of, workers_store

    with closing(workers_store(store)) as storage:
        return {
            kind: [uri_of(value, storage, kind) for value in values]
            for kind, values in given.items()
            if values
        }


@click.command()
@click.argument("job_id", required=False)
@click.option("--run", help="Follow a whole run.")
@click.option("--json", "as_json", is_flag=True, help="CloudEvents, one JSON object a line.")
@click.option("--no-follow", is_flag=True, help="Only what has happened so far.")
@click.option("--wait", is_flag=True, help="Wait for a run that has not begun.")
@redis_option
def watch(
    job_id: str | None, run: str | None, as_json: bool, no_follow: bool, wait: bool, redis_url: str | None
) -> None:
    """Show the history of a job or run, then what happens until the job's end."""
    if (job_id is None) == (run is None):
        raise click.UsageError("give a job's id or --run NAME")
    if wait and (run is None or no_follow):
        raise click.UsageError("--wait is for a run that is followed: give --run NAME alone")
    with open_client(redis_url) as client:
        if run is not None and not no_follow and not _is_known(client, run):
            if not wait:
                raise SaggarError(f"{UnknownRun(run)} (--wait: until it begins)")
            click.echo(f"run {run} is unknown: waiting until it begins", err=True)
        seen = False
        for event in client.events(job_id, run=run, follow=not no_follow):
            seen = True
            click.echo(event.to_json() if as_json else _event_line(event))
    if not seen:
        what = f"run {run}: never started here, or they" if run else f"job {job_id}: they"
        click.echo(f"no events of {what} have expired", err=True)


def _is_known(client: JobClient, run: str) -> bool:
    """Whether a run of this name was begun, or a job says that it is of it."""
    with closing(connect(client.settings)) as connection:
        try:
            RunLedger(connection, client.settings).get(run)
            return True
        except UnknownRun:
            return next(client.events(run=run, follow=False), None) is not None or bool(
                client.list(run=run, limit=1).records
            )


def _event_line(event: Event) -> str:
    parts = [event.time.strftime("%H:%M:%S.%f")[:-3], f"{event.kind:<10}", event.job or ""]
    shown = {name: value for name, value in event.data.items() if value not in (None, "")}
    if isinstance(unread := shown.get("unread"), list):
        shown["unread"] = json.dumps(unread, separators=(",", ":"))
    if event.kind == "progress":
        shown = {"step": _steps(event.data.get("step"), event.data.get("steps"))}
    return "  ".join([*parts, *(f"{name}={value}" for name, value in shown.items())])


def _steps(step: object, steps: object) -> str:
    """How many there will be is not known before the prompt is encoded."""
    return f"{step}/{steps}" if steps else f"{step}"


@click.command()
@click.argument("job_id")
@click.option("--json", "as_json", is_flag=True, help="The whole record.")
@redis_option
def status(job_id: str, as_json: bool, redis_url: str | None) -> None:
    """Show what has become of a job."""
    with open_client(redis_url) as client:
        record = client.status(job_id)
    if as_json:
        click.echo(record.model_dump_json(indent=2, exclude_none=True))
        return
    for name, value in _facts(record):
        click.echo(f"{name:<10} {value}")


def _facts(record: JobRecord) -> list[tuple[str, object]]:
    facts: list[tuple[str, object]] = [
        ("id", record.id),
        ("state", record.state),
        ("model", record.job.model),
    ]
    if record.position is not None:
        facts.append(("position", f"{record.position + 1} in the queue"))
    if record.progress is not None:
        facts.append(("progress", f"step {_steps(record.progress.step, record.progress.steps)}"))
    facts.append(("attempt", record.attempt))
    if record.error is not None:
        facts.append(("error", f"{record.error.kind}: {record.error.message}"))
    if record.result is not None:
        facts += [("batch", f"{record.result.batch_size} jobs ({record.result.batch_id})")]
        facts += [("output", output.uri) for output in record.result.outputs]
        facts += [("unread", told(one)) for one in record.result.unread or ()]
    return facts


def told(unread: UnreadText) -> str:
    """In a line for people."""
    counts = f"{unread.read_tokens} of its {unread.tokens} tokens count"
    return f"the {unread.field} is longer than the model reads: {counts}"


@click.command("list")
@click.option("--state", type=click.Choice(get_args(State)))
@click.option("--run")
@click.option("--tag")
@click.option("--tenant")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True)
@click.option("--cursor", help="Go on behind the page before.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@redis_option
def list_jobs(redis_url: str | None, as_json: bool, limit: int, cursor: str | None, **by: str | None) -> None:
    """List jobs, newest first, by state, run, tag or tenant."""
    if not any(by.values()):
        with open_client(redis_url) as client:
            for name, count in client.counts().items():
                click.echo(f"{name:<10} {count}")
        click.echo("Give --state, --run, --tag or --tenant to see jobs.", err=True)
        return
    with open_client(redis_url) as client:
        page = client.list(
            state=cast("State | None", by["state"]),
            run=by["run"],
            tag=by["tag"],
            tenant=by["tenant"],
            limit=limit,
            cursor=cursor,
        )
    for record in page.records:
        click.echo(record.model_dump_json(exclude_none=True) if as_json else _row(record))
    if not page.records and not page.cursor:
        click.echo("no such jobs", err=True)
    if page.cursor:
        click.echo(f"More: add --cursor {page.cursor}", err=True)


def _row(record: JobRecord) -> str:
    when = record.times.submitted.strftime("%Y-%m-%d %H:%M:%S")
    return f"{record.id:<34} {record.state:<10} {when}  {record.job.model}"


@click.command()
@click.argument("job_ids", nargs=-1)
@click.option("--run", help="All open jobs of a run.")
@redis_option
def cancel(job_ids: tuple[str, ...], run: str | None, redis_url: str | None) -> None:
    """Cancel jobs: a waiting one ends at once, a running one before its next step. Exits 2 if one is unknown."""
    if not job_ids and run is None:
        raise click.UsageError("give ids of jobs or --run NAME")
    unknown = False
    with open_client(redis_url) as client:
        if run is not None:
            _planned(
                client, lambda runs: runs.change(run, "cancelled", "by hand"), lambda runs: runs.void(run)
            )
        wanted = [*job_ids, *(_ids(client, run, OPEN) if run else ())]
        if not wanted:
            click.echo(f"run {run} has no open jobs", err=True)
        for job_id in wanted:
            outcome = client.cancel(job_id)
            unknown |= outcome.outcome == "unknown"
            click.echo(f"{job_id} {outcome.outcome}" + (f" ({outcome.state})" if outcome.state else ""))
    sys.exit(2 if unknown else 0)


@click.command()
@click.argument("job_ids", nargs=-1)
@click.option("--run", help="All failed jobs of a run.")
@redis_option
def retry(job_ids: tuple[str, ...], run: str | None, redis_url: str | None) -> None:
    """Queue failed, cancelled or expired jobs again."""
    if not job_ids and run is None:
        raise click.UsageError("give ids of jobs or --run NAME")
    refused = False
    with open_client(redis_url) as client:
        planned = run is not None and _planned(client, lambda runs: runs.again(run, ["failed"]))
        wanted = [*job_ids, *(_ids(client, run, ("failed",)) if run else ())]
        if not wanted and not planned:
            click.echo(f"run {run} has no failed jobs", err=True)
        for job_id in wanted:
            try:
                client.retry(job_id)
                click.echo(f"{job_id} queued")
            except (SaggarError, JobFailed) as error:
                refused = True
                click.echo(f"{job_id}: {error}", err=True)
    sys.exit(2 if refused else 0)


def _planned(client: JobClient, *changes: Callable[[RunLedger], object]) -> bool:
    """Of a run that was planned (saggar run): its rows too. False: a name that jobs alone have is none."""
    connection = connect(client.settings)
    try:
        runs = RunLedger(connection, client.settings)
        for change in changes:
            change(runs)
        return True
    except UnknownRun:
        return False
    finally:
        connection.close()


def _ids(client: JobClient, run: str, states: Sequence[State]) -> list[str]:
    """The jobs of a run in these states. Listed before any is touched, since that moves them."""
    return [record.id for record in records_of(client, run, *states)]


def _warn_without_workers(client: JobClient, model: str) -> None:
    connection = connect(client.settings)
    workers = Cards(connection, client.settings).workers_of(model)
    connection.close()
    if not workers:
        click.echo(f"no worker serves {model} at this moment: the job waits for one", err=True)
