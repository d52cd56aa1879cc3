"""The options of `saggar run`, and what they mean together."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar, get_args

import click
from pydantic import TypeAdapter, ValidationError
from saggar.jobs.errors import ConfigError
from saggar.jobs.invalid import one_line
from saggar.jobs.runs import OutputFormat
from saggar.jobs.runs.plan import parse_pairs
from saggar.jobs.runs.record import WINDOW, RunSpec
from saggar.jobs.settings import JobSettings
from saggar.workers.runs.finish import staging
from saggar.workers.runs.gates import parse_gates
from saggar.workers.runs.launch import Flags

F = TypeVar("F", bound=Callable[..., object])
_PATH = click.Path(path_type=Path)

FORMATS = get_args(OutputFormat)

OPTIONS = (
    click.option(
        "--model",
        help="A diffusers folder, a hub id, s3://bucket/folder or a built-in model.  [default: saggar/emoji]",
    ),
    click.option("--to", "target", default="out", show_default=True, help="A folder or s3://bucket/prefix."),
    click.option("--name", help="The run's name.  [default: the manifest's]"),
    click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="NAME=VALUE",
        help="A parameter, or another field, of every row that does not say it: --set num_inference_steps=28.",
    ),
    click.option(
        "--column",
        "columns",
        multiple=True,
        metavar="FIELD=COLUMN",
        help="--column prompt=caption; see docs/runs.md.",
    ),
    click.option("--seeds", metavar="0..3", help="Make every row with each of these seeds: 0..3 or 1,5,9."),
    click.option(
        "--matrix",
        multiple=True,
        metavar="NAME=A,B",
        help="Make every row with each of these values; model too.",
    ),
    click.option("--skip-bad", is_flag=True, help="Leave out rows that cannot run, instead of refusing all."),
    click.option("--extend", is_flag=True, help="Add to a run of this name what is new in the manifest."),
    click.option("--plan", "dry", is_flag=True, help="Check and tell the plan; queue nothing."),
    click.option(
        "--window", type=int, default=WINDOW, show_default=True, help="Most jobs that are queued at once."
    ),
    click.option("--max-failures", type=int, help="Pause the run once so many rows have failed."),
    click.option(
        "--time-budget", "time_budget_s", type=float, metavar="SECONDS", help="Pause the run after so long."
    ),
    click.option(
        "--format",
        "format_",
        type=click.Choice(FORMATS),
        default="objects",
        show_default=True,
        help="Single files, or shards; a file's own form is --set format=webp.",
    ),
    click.option("--shard-count", type=int, metavar="ROWS", help="Samples of a shard, at most."),
    click.option("--shard-mb", type=float, metavar="MB", help="Size of a shard.  [default: 256]"),
    click.option(
        "--gate",
        "gates",
        multiple=True,
        metavar="NAME",
        help="A check that every output must pass; see docs/gates.md.",
    ),
    click.option(
        "--accept",
        type=click.IntRange(1, 1024),
        callback=lambda _ctx, _option, value: value or 0,
        help="Accepted outputs wanted of a row.  [default: all]",
    ),
    click.option(
        "--redraws", type=int, default=8, show_default=True, help="Further draws that a row may cost."
    ),
    click.option(
        "--cluster", is_flag=True, help="Use the cluster's queue of SAGGAR_REDIS_URL, not this machine."
    ),
    click.option("--redis", "redis_url", help="The same, with the URL given here."),
    click.option("--detach", is_flag=True, help="Let the cluster's workers control the run, and return."),
    click.option("--data", type=_PATH, help="Where the embedded queue lives.  [default: TO/.saggar]"),
    click.option("--max-batch", type=int, help="Most rows of one batch.  [default: 8]"),
    click.option("--device", help="auto, cpu, cuda or cuda:N."),
    click.option(
        "--executor", type=click.Choice(["multiproc", "local"]), help="Ranks as processes, or in the worker."
    ),
    click.option("--calibration-file", help="Where attention's auto keeps what it found."),
    click.option(
        "--warmup",
        multiple=True,
        callback=lambda _ctx, _option, value: value or None,
        metavar="NAME=VALUE,...",
        help="A kind of request that is tried first: height=1024,rows=4; or none.",
    ),
    click.option("--sheet/--no-sheet", default=True, help="Write contact-sheet.png at the end."),
)
MOST_SHARD_BYTES = 10**12
_SETTINGS = ("window", "max_failures", "time_budget_s", "sheet", "shard_count", "gates", "accept", "redraws")
_WORKER = ("max_batch", "device", "executor", "calibration_file", "warmup")


def run_options(command: F) -> F:
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def ask_values(manifest: Path, options: dict[str, object]) -> dict[str, object]:
    """The fields of commands.run.Ask. Raises ConfigError."""
    name = str(options["name"] or run_name(manifest))
    redis_url = options["redis_url"]
    if options["cluster"] and redis_url is None:
        redis_url = JobSettings.from_env().redis_url
    target = str(options["target"])
    if options["detach"]:
        _check_detached(redis_url, target)
    settings = {field: options[field] for field in _SETTINGS}
    settings |= _output_settings(options, name)
    _check_settings({"name": name, **settings})
    pairs = parse_pairs(options["columns"], "--column")  # type: ignore[arg-type]
    columns = {source: field for field, source in pairs.items()}
    if len(columns) != len(pairs):
        raise ConfigError("--column: two fields from one column; give each its own")
    return {
        "target": target,
        "name": name,
        "flags": Flags(options["sets"], options["seeds"], options["matrix"]),  # type: ignore[arg-type]
        "columns": columns,
        "settings": settings,
        "worker": {field: options[field] for field in _WORKER},
        "redis_url": redis_url,
        **{field: options[field] for field in ("model", "data", "detach", "extend", "skip_bad", "dry")},
    }


def run_name(manifest: Path) -> str:
    """The manifest's name, in letters that a run's may have."""
    kept = "".join(
        char if (char.isascii() and char.isalnum()) or char in "._-" else "-" for char in manifest.stem
    )
    return (kept.lstrip("._-") or "run")[:128]


def _output_settings(options: dict[str, object], name: str) -> dict[str, object]:
    """Raises ConfigError for flags that say nothing together."""
    form, megabytes = options["format_"], options["shard_mb"]
    if form == "objects" and (options["shard_count"] is not None or megabytes is not None):
        raise ConfigError("--shard-count and --shard-mb are of shards: give --format webdataset or parquet")
    if form == "parquet" and find_spec("pyarrow") is None:
        raise ConfigError(
            "--format parquet needs pyarrow, which is not installed: pip install 'saggar[datasets]'"
        )
    if options["accept"] and not options["gates"]:
        raise ConfigError("--accept counts what gates accept: give --gate too")
    parse_gates(options["gates"])  # type: ignore[arg-type]
    settings: dict[str, object] = {"format": form}
    if form != "objects":
        settings["prefix"] = staging(name)
    if megabytes is not None:
        size = float(str(megabytes)) * 1e6
        if not 1 <= size <= MOST_SHARD_BYTES:
            raise ConfigError(
                f"--shard-mb: {megabytes} is no size (allowed: 0.000001 to {MOST_SHARD_BYTES / 1e6:.0f})"
            )
        settings["shard_bytes"] = round(size)
    return settings


def _check_detached(redis_url: object, target: str) -> None:
    if redis_url is None:
        raise ConfigError("--detach needs a cluster whose workers go on: give --cluster or --redis")
    if "://" not in target:
        raise ConfigError(
            f"--detach --to {target}: the workers write it, so say where for them: s3://bucket/prefix, or "
            "file:///folder for a folder that every machine sees"
        )


def _check_settings(settings: dict[str, object]) -> None:
    """What the run's own settings may be is said once, by RunSpec."""
    required: dict[str, object] = {"target": "", "model": "", "digest": "", "planned": 0}
    try:
        TypeAdapter(RunSpec).validate_python({**required, **settings})
    except ValidationError as error:
        line = one_line(error, {})
        flag = line.field.partition("[")[0].removesuffix("_s").replace("_", "-")
        raise ConfigError(f"--{flag}{str(line).removeprefix(line.field)}") from None
