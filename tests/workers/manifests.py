"""Manifests as tests write and read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from saggar.jobs import Job, ModelCard
from saggar.jobs.runs.plan import Expansion
from saggar.workers.runs.launch import Flags
from saggar.workers.runs.manifest import Manifest
from saggar.workers.runs.readers import Columns

from tests.jobs.samples import CARD, MODEL

PARAMS = frozenset(CARD.checker.allowed)


def card_of(job: Job) -> ModelCard | None:
    return CARD if job.model == MODEL else None


def expansion(run: str = "r", sets: Sequence[str] = ("steps=5",), **flags: object) -> Expansion:
    return Flags(sets=sets, **flags).expansion(run, MODEL)  # type: ignore[arg-type]


def jobs(manifest: Manifest) -> list[Job]:
    return [Job.model_validate_json(line) for line in manifest.lines()]


def rows(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def read(
    path: Path, *given: object, how: Expansion | None = None, columns: dict[str, str] | None = None
) -> list[Job]:
    """The jobs of a file of these rows, none of them bad."""
    if given:
        rows(path, *given)
    with Manifest() as manifest:
        manifest.read(path, how or expansion(), Columns(columns or {}, PARAMS), card_of)
        assert manifest.complaint() == ""
        return jobs(manifest)
