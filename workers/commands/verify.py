"""`saggar verify PREFIX`: everything that is stored, against its hashes; on request some of it made again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import get_args

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text
from saggar.engine.config import DtypeName, EngineConfig, ExecutorKind
from saggar.engine.engine import Engine
from saggar.jobs.errors import ConfigError
from saggar.storage.base import Storage, open_storage
from saggar.workers.runs.regenerate import Remade, recorded, remake
from saggar.workers.runs.samples import Recorded
from saggar.workers.runs.verify import Verified, survey
from saggar.workers.runs.verify import verify as verify_store

_SHOWN = 200
_COLOURS = {"missing": "red", "wrong": "red", "differs": "red", "extra": "yellow", "incomparable": "yellow"}


@click.command()
@click.argument("prefix")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option(
    "--regenerate", type=click.IntRange(0), default=0, metavar="K", help="Make K samples again and compare."
)
@click.option(
    "--model", help="What makes them: a folder, a hub id or a built-in model.  [default: the recorded name]"
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--dtype", type=click.Choice(get_args(DtypeName)), default="auto", show_default=True)
@click.option("--executor", type=click.Choice(get_args(ExecutorKind)), default="multiproc", show_default=True)
def verify(
    prefix: str,
    as_json: bool,
    regenerate: int,
    model: str | None,
    device: str,
    dtype: DtypeName,
    executor: ExecutorKind,
) -> None:
    """Read every result and every shard under PREFIX (a folder or s3://bucket/prefix) and compare its hash.

    Exits 1 when something is missing, wrong or extra, or when a sample that was made again is not the same.
    """
    _must_exist(prefix)
    console = Console(stderr=True)
    with closing(open_storage(prefix)) as storage:
        report = _verify(console, storage, regenerate)
        if not report.results and not report.shards and report.clean:
            raise ConfigError(f"{prefix}: there is no result.json and no shard, so nothing to verify")
        config = EngineConfig(model=model or "", device=device, dtype=dtype, executor=executor)
        remade = list(_regenerate(storage, report, config)) if regenerate else []
    if as_json:
        content = {**report.to_json(), "regenerated": [one.to_json() for one in remade]}
        click.echo(json.dumps(content, indent=2))
    else:
        _show(report, remade)
    sys.exit(0 if report.clean and all(one.good for one in remade) else 1)


def _must_exist(prefix: str) -> None:
    """A store makes its folder, which is no way to find a mistyped one."""
    if "://" not in prefix and not Path(prefix).is_dir():
        raise ConfigError(f"{prefix}: no such folder")


def _verify(console: Console, storage: Storage, picks: int) -> Verified:
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        count, size = survey(storage)
        task = progress.add_task(f"verify {count} objects", total=size)
        report = verify_store(
            storage, picks=picks, advance=lambda _, read: progress.update(task, advance=read)
        )
        progress.update(task, completed=size)
        return report


def _regenerate(storage: Storage, report: Verified, config: EngineConfig) -> Iterator[Remade]:
    """One engine after the other, one for each recorded model."""
    known = list(recorded(storage, report.picks))
    yield from (one for one in known if isinstance(one, Remade))
    found = sorted((one for one in known if isinstance(one, Recorded)), key=lambda one: one.model)
    if config.model and len({one.model for one in found}) > 1:
        raise ConfigError("--model: the samples are of several models; verify each prefix by itself")
    for name, group in groupby(found, key=lambda one: one.model):
        with _engine(config, name) as engine:
            yield from remake(engine, list(group))


def _engine(config: EngineConfig, recorded_name: str) -> Engine:
    return Engine.make(replace(config, model=config.model or recorded_name))


def _show(report: Verified, remade: Sequence[Remade]) -> None:
    console = Console()
    if report.findings or remade:
        table = Table("status", "object", "why", box=None, pad_edge=False)
        for finding in report.findings[:_SHOWN]:
            table.add_row(_status(finding.kind), Text(finding.key, overflow="fold"), Text(finding.why))
        for one in remade:
            table.add_row(_status(one.status), Text(one.name, overflow="fold"), Text(_difference(one)))
        console.print(table)
    if len(report.findings) > _SHOWN:
        console.print(f"... and {len(report.findings) - _SHOWN} more; --json has all")
    console.print(Text(_summary(report, remade)), soft_wrap=True)


def _status(name: str) -> Text:
    return Text(name, style=_COLOURS.get(name, "green"))


def _difference(one: Remade) -> str:
    if one.why:
        return one.why
    return f"{one.numerics}" + (f", by {one.levels} of 255 at most, {one.psnr} dB" if one.levels else "")


def _summary(report: Verified, remade: Sequence[Remade]) -> str:
    kinds = [finding.kind for finding in report.findings]
    found = ", ".join(
        f"{kinds.count(kind)} {kind}" for kind in ("missing", "wrong", "extra") if kind in kinds
    )
    rows = f" with {report.rows} rows" if report.shards else ""
    again = (
        f"; {sum(one.good for one in remade)} of {len(remade)} samples are the same again" if remade else ""
    )
    plans = f"{report.runs} run{'s' * (report.runs > 1)}, " if report.runs else ""
    return (
        f"{report.results} results, {report.shards} shards{rows}, {plans}{report.objects} objects, "
        f"{report.bytes} bytes: {found or 'clean'}{again}"
    )
