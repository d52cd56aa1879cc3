"""Reading a file of prompts: every row becomes a job or an error with its line number, before anything is queued.

A row's id and seed come from its content, so the same file makes the same pictures under the same ids: running it
again makes only what is missing. Equal rows are one job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from saggar.jobs.errors import ConfigError, InvalidJob
from saggar.jobs.schema import Job, parse_job

SHOWN_ERRORS = 50


@dataclass(frozen=True)
class BadRow:
    """A row that cannot run: its line, from 1, and the reason in one line."""

    line: int
    reason: str


@dataclass
class Manifest:
    """The jobs of a file in order, without repeats."""

    jobs: list[Job] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    folded: int = 0

    def complaint(self) -> str:
        """All bad rows, one line each."""
        lines = [f"line {row.line}: {row.reason}" for row in self.bad[:SHOWN_ERRORS]]
        if len(self.bad) > SHOWN_ERRORS:
            lines.append(f"... and {len(self.bad) - SHOWN_ERRORS} more")
        return "\n".join(lines)


def read_manifest(
    path: Path, defaults: Mapping[str, object], run: str, check: Callable[[Job], Job]
) -> Manifest:
    """Reads JSON lines (one job an object a line) or, from a .txt file, one prompt a line.

    `defaults` are job fields for rows that do not name them; `params` are merged. `check` is the model card's.
    Raises ConfigError when the file cannot be read as such.
    """
    manifest = Manifest()
    seen: set[str] = set()
    for line, text in _lines(path):
        try:
            job = check(_job(_row(path, text), defaults, run))
        except InvalidJob as error:
            manifest.bad.append(BadRow(line, str(error)))
            continue
        if job.id in seen:
            manifest.folded += 1
        else:
            seen.add(job.id)
            manifest.jobs.append(job)
    if not manifest.jobs and not manifest.bad:
        raise ConfigError(f"{path}: no rows; give one JSON object or one prompt a line")
    return manifest


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, text.strip()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None


def _row(path: Path, text: str) -> dict[str, object]:
    if path.suffix == ".txt":
        return {"prompt": text}
    try:
        row = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise InvalidJob("row", "is not JSON", "one JSON object a line") from None
    if not isinstance(row, dict):
        raise InvalidJob("row", "is not a JSON object", "one JSON object a line")
    return row


def _job(row: dict[str, object], defaults: Mapping[str, object], run: str) -> Job:
    merged = {**defaults, "run": run, **row}
    for name in ("params", "output"):
        own, common = row.get(name, {}), defaults.get(name, {})
        if isinstance(own, dict) and isinstance(common, dict):
            merged[name] = {**common, **own}
    job = parse_job({"id": "unnamed", **merged})
    digest = sha256(f"{run}\n{job.digest()}".encode()).hexdigest()
    update: dict[str, object] = {}
    if "id" not in row:
        update["id"] = digest[:32]
    if job.seed is None:
        update["seed"] = int(digest[32:40], 16)
    return job.model_copy(update=update)


def parse_settings(pairs: Sequence[str]) -> dict[str, object]:
    """`--set steps=28` pairs as params: values are JSON where they can be read as such, else text."""
    params: dict[str, object] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise ConfigError(f"--set {pair}: write it as name=value, such as num_inference_steps=28")
        try:
            params[name] = json.loads(value)
        except json.JSONDecodeError:
            params[name] = value
    return params
