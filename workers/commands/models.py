"""`saggar models`: what can be served here, what is served by a cluster, and small checkpoints for trying things."""

from __future__ import annotations

import json
from pathlib import Path

import click
from saggar.jobs.cards import Cards
from saggar.jobs.errors import ConfigError
from saggar.jobs.settings import connect
from saggar.workers.commands.jobs import open_client, redis_option
from saggar.workers.model_source import fetch_for_people


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True)
@click.pass_context
def models(ctx: click.Context, as_json: bool) -> None:
    """List families of models and built-in models; see the subcommands for more."""
    if ctx.invoked_subcommand is not None:
        return
    from saggar.engine.models.registry import families, installed

    known = [
        (name, family.__name__, family.__module__.rpartition(".")[2]) for name, family in families().items()
    ]
    if as_json:
        rows = [{"class_name": name, "family": family, "module": module} for name, family, module in known]
        click.echo(json.dumps({"families": rows, "installed": installed()}, indent=2))
        return
    click.echo("Pipelines that can be served (a diffusers folder whose model_index.json names one):")
    for name, _, module in known:
        click.echo(f"  {name:<28} {module}")
    click.echo(f"Built-in models: {', '.join(installed()) or 'none'}")


@models.command()
@redis_option
def served(redis_url: str | None) -> None:
    """List the models that a cluster's workers have published, and how many serve each now."""
    with open_client(redis_url) as client:
        settings = client.settings
    connection = connect(settings)
    cards = Cards(connection, settings)
    if not cards.list():
        click.echo("no model yet: saggar worker --model ... publishes one once it has loaded", err=True)
    for card in cards.list():
        click.echo(
            f"{card.model:<28} {card.family:<12} {','.join(card.tasks):<8} workers {len(cards.workers_of(card.model))}"
        )
    connection.close()


@models.command()
@click.argument("model")
def inspect(model: str) -> None:
    """Show what MODEL is and takes, as JSON, without loading its weights."""
    from saggar.engine.models.registry import open_family

    family = open_family(fetch_for_people(model))
    click.echo(json.dumps(family.info(model, 8, "").to_dict(), indent=2))


@models.command("make-tiny")
@click.argument("model")
@click.argument("folder", type=click.Path(path_type=Path))
def make_tiny_command(model: str, folder: Path) -> None:
    """Write a tiny checkpoint with random weights of MODEL (flux, sd3, noop ...) to FOLDER: for tests and demos."""
    from saggar.engine.models.tiny import make_tiny

    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: name a new folder")
    make_tiny(model, folder)
    click.echo(f"wrote {folder}")
