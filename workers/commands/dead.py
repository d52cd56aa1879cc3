"""`saggar dead`: jobs that were given up after too many crashes."""

from __future__ import annotations

import click
from saggar.workers.commands.jobs import open_client, redis_option


@click.group()
def dead() -> None:
    """Jobs set aside because their worker died too often while it executed them."""


@dead.command("list")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True)
@redis_option
def list_dead(limit: int, redis_url: str | None) -> None:
    """Show them, newest first, with the reason."""
    with open_client(redis_url) as client:
        records = client.list(dead=True, limit=limit).records
    for record in records:
        reason = f"{record.error.kind}: {record.error.message}" if record.error else record.state
        click.echo(f"{record.id:<34} attempts {record.attempt}  {reason}")
    if not records:
        click.echo("no jobs are set aside", err=True)


@dead.command("retry")
@click.argument("job_ids", nargs=-1, required=True)
@redis_option
def retry_dead(job_ids: tuple[str, ...], redis_url: str | None) -> None:
    """Queue them again."""
    with open_client(redis_url) as client:
        for job_id in job_ids:
            client.retry(job_id)
            click.echo(f"{job_id} queued")
