"""`saggar runs`: the runs of a cluster, how they stand, and what to do with them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime

import click
from pydantic import JsonValue
from saggar.jobs.errors import SaggarError
from saggar.jobs.runs import Run, RunLedger
from saggar.jobs.runs.listing import stop_jobs
from saggar.jobs.settings import connect
from saggar.workers.commands.jobs import job_settings, redis_option

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")


@click.group(invoke_without_command=True)
@redis_option
@click.pass_context
def runs(ctx: click.Context, redis_url: str | None) -> None:
    """List the runs that a queue knows; see the subcommands for more."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_runs, redis_url=redis_url)
    elif redis_url is not None:
        raise click.UsageError(f"give --redis behind {ctx.invoked_subcommand}")


@contextmanager
def _ledger(redis_url: str | None) -> Iterator[RunLedger]:
    settings = job_settings(redis_url)
    client = connect(settings)
    try:
        yield RunLedger(client, settings)
    finally:
        client.close()


@runs.command("list")
@json_option
@redis_option
def list_runs(redis_url: str | None = None, as_json: bool = False) -> None:
    """List runs, the newest first."""
    with _ledger(redis_url) as ledger:
        found = list(ledger.list())
    for run in found:
        click.echo(json.dumps(_told(run)) if as_json else _line(run))
    if not found:
        click.echo("no runs: saggar run MANIFEST --cluster --to ... begins one", err=True)


def _line(run: Run) -> str:
    trouble = "".join(
        f", {count} {what}"
        for what, count in (("failed", run.failed), ("rejected", run.rejected), ("cancelled", run.cancelled))
        if count
    )
    return f"{run.name:<24} {run.state:<10} {run.done}/{run.planned} done{trouble}  {run.spec.model}  {run.spec.target}"


@runs.command()
@click.argument("name")
@json_option
@redis_option
def show(name: str, redis_url: str | None, as_json: bool) -> None:
    """Show how a run stands, and what went wrong in it."""
    with _ledger(redis_url) as ledger:
        run = ledger.get(name)
        kinds, wrong = ledger.failures(name)
        _, gates = ledger.tallies(name)
    if as_json:
        click.echo(json.dumps({**_told(run), "kinds": kinds, "gates": gates}, indent=2))
        return
    click.echo(_line(run))
    if run.why:
        click.echo(f"because: {run.why}")
    click.echo(
        f"open {run.open}, waiting {run.waiting}; {run.rate:.1f} rows/s; mean batch {run.mean_batch:.1f}; "
        f"{run.pictures} outputs, {run.bytes / 1e6:,.1f} MB"
    )
    if run.state == "running" and not run.held:
        who = "a worker takes it up soon" if run.spec.detached else "saggar run, as it was started, goes on"
        click.echo(f"nobody controls it at this moment: {who}")
    for what, counts in (("failures", kinds), ("refused by gates", gates)):
        if counts:
            click.echo(f"{what}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    for n, text in list(wrong.items())[:10]:
        click.echo(f"  row {n}: {text}")


@runs.command()
@click.argument("name")
@redis_option
def pause(name: str, redis_url: str | None) -> None:
    """Pause a run: what waits leaves the queue, what is being made goes on to its end."""
    _change(redis_url, lambda ledger: ledger.change(name, "paused", "by hand"), "paused")


@runs.command()
@click.argument("name")
@redis_option
def resume(name: str, redis_url: str | None) -> None:
    """Let a paused run go on."""
    _change(redis_url, lambda ledger: ledger.change(name, "running"), "running")


@runs.command()
@click.argument("name")
@redis_option
def cancel(name: str, redis_url: str | None) -> None:
    """Cancel a run: every row that is not done is cancelled, also those that run."""
    from saggar.jobs.client import JobClient

    with _ledger(redis_url) as ledger:
        state = ledger.change(name, "cancelled", "by hand")
        if state == "cancelled":
            # Here, for its controller may be gone: a job that ends twice ends once. Rows that are open are settled by
            # whoever controls the run next.
            ledger.void(name)
            with JobClient(job_settings(redis_url)) as client:
                for job_id in ledger.opened(name):
                    client.cancel(job_id)
    _say(name, state, "cancelled")


@runs.command()
@click.argument("name")
@click.option(
    "--end",
    "ends",
    multiple=True,
    type=click.Choice(["failed", "rejected", "cancelled"]),
    default=["failed"],
    show_default=True,
)
@redis_option
def retry(name: str, ends: tuple[str, ...], redis_url: str | None) -> None:
    """Make rows again that failed, were rejected or were cancelled."""
    with _ledger(redis_url) as ledger:
        count = ledger.again(name, list(ends))  # type: ignore[arg-type]
        run = ledger.get(name)
    click.echo(f"{count} rows wait to be made again")
    if count and not run.held and not run.spec.detached:
        click.echo("nobody controls the run: saggar run, as it was started, goes on")


@runs.command()
@click.argument("name")
@redis_option
def forget(name: str, redis_url: str | None) -> None:
    """Forget a run that nobody controls. What it made stays where it is; its jobs that wait or run are cancelled."""
    from saggar.jobs.client import JobClient

    with _ledger(redis_url) as ledger, JobClient(job_settings(redis_url)) as client:
        ledger.get(name)
        if not ledger.drop(name):
            raise SaggarError(f"run {name} is controlled by somebody: pause or cancel it first")
        stopped = stop_jobs(client, name)  # now that nobody queues more of them
    click.echo(f"{name} forgotten" + (f", {len(stopped)} jobs cancelled" if stopped else ""))


@runs.command()
@click.argument("first")
@click.argument("second")
@redis_option
def diff(first: str, second: str, redis_url: str | None) -> None:
    """Compare two runs: which rows they share, and what differs in the others. Exits 1 when they differ."""
    from saggar.workers.runs.compare import compare

    with _ledger(redis_url) as ledger:
        difference = compare(ledger.get(first), ledger.get(second))
    for line in difference.lines():
        click.echo(line)
    sys.exit(1 if difference else 0)


def _change(redis_url: str | None, change: Callable[[RunLedger], str], wanted: str) -> None:
    name = str(click.get_current_context().params["name"])
    with _ledger(redis_url) as ledger:
        state = change(ledger)
    _say(name, state, wanted)


def _say(name: str, state: str, wanted: str) -> None:
    if state != wanted:
        raise SaggarError(f"run {name} is {state}: it cannot become {wanted}")
    click.echo(f"{name} {state}")


def _told(run: Run) -> dict[str, JsonValue]:
    told: dict[str, JsonValue] = {
        "name": run.name,
        "waiting": run.waiting,
        "mean_batch": round(run.mean_batch, 3),
    }
    for field in fields(run):
        value = getattr(run, field.name)
        if field.name == "spec":
            told["spec"] = run.spec.model_dump(mode="json")
        else:
            told[field.name] = value.isoformat() if isinstance(value, datetime) else value
    return told
