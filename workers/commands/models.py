"""`saggar models`: what can be served here, what is served by a cluster, and small checkpoints for trying things."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click
from saggar.jobs.cards import Cards
from saggar.jobs.errors import ConfigError
from saggar.jobs.settings import connect
from saggar.workers.commands.jobs import job_settings, redis_option

if TYPE_CHECKING:
    from saggar.engine.models.capabilities import Capabilities
    from saggar.engine.models.inspection import Inspection, Part
    from saggar.engine.request import JsonValue, ModelInfo

_MADE = {"image": "pictures", "video": "videos", "audio": "sounds"}


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="The same, for programs.")
@click.option("--markdown", "as_markdown", is_flag=True, help="docs/models.md.")
@click.pass_context
def models(ctx: click.Context, as_json: bool, as_markdown: bool) -> None:
    """Families of models with what they can do, and built-in models; see the subcommands for more."""
    if ctx.invoked_subcommand is not None:
        return
    from saggar.engine.models.capabilities import all_capabilities, markdown
    from saggar.engine.models.registry import installed

    if as_markdown:
        click.echo(markdown(), nl=False)
        return
    found = all_capabilities()
    if as_json:
        click.echo(json.dumps({"families": [vars(one) for one in found], "installed": installed()}, indent=2))
        return
    click.echo(
        "A diffusers folder, or a hub id, is served whose model_index.json names one of these pipelines:\n"
    )
    for line in _columns(_families_table(found)):
        click.echo(line)
    click.echo(
        "\n  Any other pipeline of diffusers that makes pictures of a prompt is called as a whole, by request."
    )
    plugins = [f"{one.family} ({one.package})" for one in found if one.package]
    if plugins:
        click.echo(f"\nFrom plug-ins: {', '.join(plugins)}")
    click.echo(f"\nBuilt-in models: {', '.join(installed()) or 'none'}")
    click.echo("One model in particular: saggar models inspect MODEL")


@models.command()
@redis_option
def served(redis_url: str | None) -> None:
    """List the models that a cluster's workers have published, and how many serve each now."""
    settings = job_settings(redis_url)
    with closing(connect(settings)) as client:
        cards = Cards(client, settings)
        found = cards.list()
        if not found:
            click.echo("no model yet: saggar worker --model ... publishes one once it has loaded", err=True)
        for card in found:
            workers = len(cards.workers_of(card.model))
            click.echo(f"{card.model:<28} {card.family:<12} {','.join(card.tasks):<8} workers {workers}")


@models.command()
@click.argument("model")
@redis_option
def forget(model: str, redis_url: str | None) -> None:
    """Take MODEL out of those that jobs may name, such as one that was mistyped.

    Jobs that wait for it go on waiting: see them with `saggar list --state queued`, end them with `saggar cancel`.
    """
    settings = job_settings(redis_url)
    with closing(connect(settings)) as client:
        cards = Cards(client, settings)
        if workers := cards.workers_of(model):
            raise ConfigError(f"{model} is served by {', '.join(workers)}: stop that first")
        cards.forget(model)
    click.echo(f"{model} is forgotten; a worker that serves it makes it known again")


@models.command()
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="The same, for programs.")
def inspect(model: str, as_json: bool) -> None:
    """Show what MODEL is, takes and needs, without loading its weights.

    MODEL is a folder, a hub id, s3://bucket/folder or a built-in name. Of what lies elsewhere settings and the
    headers of weights are read. With a component that could not be loaded the exit status is 1.
    """
    from saggar.engine.models.inspection import inspect_model
    from saggar.workers.model_source import is_remote, outlined

    with ExitStack() as stack:
        outline = stack.enter_context(outlined(model)) if is_remote(model) else None
        found = inspect_model(model, outline=outline)
    lines = [json.dumps(found.to_dict(), indent=2)] if as_json else _told(found)
    for line in lines:
        click.echo(line)
    troubles = [f"{part.name}: {part.trouble}" for part in found.parts if part.trouble]
    if troubles:
        more = f", and {len(troubles) - 1} more" if troubles[1:] else ""
        click.secho(f"saggar: {model} cannot be loaded: {troubles[0]}{more}", fg="red", err=True)
        sys.exit(1)


@models.command("make-tiny")
@click.argument("family")
@click.argument("folder", type=click.Path(path_type=Path))
def make_tiny_command(family: str, folder: Path) -> None:
    """Write a tiny checkpoint with random weights to FOLDER, for tests and demos.

    FAMILY is flux, sdxl, wan, stable-audio, noop, ...; a name that is none lists them all.
    """
    from saggar.engine.models.tiny import make_tiny

    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: name a new folder")
    # What transformers says of files that take no time and of libraries that tests do not need.
    for name, value in {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}.items():
        os.environ.setdefault(name, value)
    make_tiny(family, folder)
    click.echo(f"wrote {folder}")


def _families_table(found: Iterable[Capabilities]) -> Iterator[list[str]]:
    yield ["PIPELINE", "FAMILY", "TASKS", "BATCHES", "SIZES IN A BATCH", "ROWS SHARE"]
    for one in found:
        for pipeline in one.pipelines:
            mixed = "mixed" if one.mixed_sizes else "one"
            yield [
                pipeline, one.family, ",".join(one.tasks), one.batches, mixed, ", ".join(one.shared) or "nothing"
            ]  # fmt: skip


def _told(found: Inspection) -> Iterator[str]:
    """An inspection for people."""
    info, can = found.info, found.can
    whose = f" of the plug-in {can.package}" if can.package else ""
    yield from (
        f"{info.model}",
        f"  {info.class_name}, served by the family {can.family}{whose}: {can.about}",
    )
    where = f"in {found.folder}" if found.folder else "whose weights were not fetched"
    yield from (f"  revision {info.revision}, {where}", "", "What it does")
    yield from _columns([*_media(found), *_abilities(can)])
    if found.parts:
        yield from ("", "Memory of its weights (what a step computes comes on top)")
        yield from _columns(_memory(found))
        yield from (f"  {part.name}: {part.trouble}" for part in found.parts if part.trouble)
    yield from ("", "Parameters")
    yield from _columns(_parameters(found))
    yield from ("", "Limits")
    yield from _columns([name.replace("_", " "), str(limit)] for name, limit in info.limits.items())


def _media(found: Inspection) -> Iterator[list[str]]:
    """Tasks with the files that they take, and the files that come out."""
    from saggar.workers.encode_media import FORMATS

    info = found.info
    tasks = (f"{task} ({files})" if (files := _files(info, task)) else task for task in info.tasks)
    yield ["tasks", ", ".join(tasks)]
    yield ["makes", f"{_MADE[info.medium]}: {', '.join(FORMATS[info.medium])}"]


def _files(info: ModelInfo, task: str) -> str:
    """`image 1 to 4, mask 0 to 1`."""
    taken = info.task_inputs.get(task, {}).items()
    return ", ".join(
        f"{kind} {least}" if least == most else f"{kind} {least} to {most}" for kind, (least, most) in taken
    )


def _abilities(can: Capabilities) -> Iterator[list[str]]:
    joining = ": requests join and leave between steps" if can.step_batches else " alone"
    yield ["batches", f"{can.batches}{joining}"]
    yield ["rows share", ", ".join(can.shared) or "nothing"]
    yield ["rows may differ in", ", ".join(["prompt", "seed", *can.own])]
    yield ["sizes in a batch", "mixed" if can.mixed_sizes else "one"]
    yield ["guidance", ", ".join(can.guidance) or "none"]
    yield ["progress and cancel", "at each step" if can.steps else "none once it runs"]
    yield ["previews", "yes" if can.previews else "no"]
    yield ["streaming", "yes" if can.streaming else "no"]


def _memory(found: Inspection) -> Iterator[list[str]]:
    yield ["component", "class", "values", "stored as", *found.loaded]
    for part in found.parts:
        yield [
            part.name,
            part.class_name,
            _count(part.values),
            _stored(part),
            *map(_size, part.loaded.values()),
        ]
    values = sum(part.values for part in found.parts)
    yield ["all", "", _count(values), "", *map(_size, found.loaded.values())]


def _parameters(found: Inspection) -> Iterator[list[str]]:
    from saggar.engine.params import describe

    properties = cast("dict[str, dict[str, JsonValue]]", found.info.params_schema.get("properties", {}))
    for name, words in properties.items():
        default = f"default {json.dumps(words['default'])}" if "default" in words else "required"
        tasks = cast("list[str]", words.get("x-tasks", []))
        yield [name, default, describe(words) + (f"; for {', '.join(tasks)}" if tasks else "")]


def _stored(part: Part) -> str:
    if part.trouble:
        return "unreadable"
    dtypes = " + ".join(f"{dtype} {_size(size)}" for dtype, size in part.stored.items())
    return f"{dtypes} ({part.variant})" if part.variant else dtypes


def _columns(rows: Iterable[list[str]]) -> Iterator[str]:
    """Two spaces in front of each row, cells under one another."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()


def _count(values: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if values >= size:
            return f"{values / size:.1f} {unit}"
    return str(values)


def _size(size: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size / 1000:.1f} kB"
