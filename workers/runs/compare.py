"""Two runs, row by row, by their plans: a row is its request without the run and the id."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field

from pydantic import JsonValue
from saggar.jobs.runs import Run
from saggar.jobs.schema import Job
from saggar.storage.base import open_storage
from saggar.workers.runs.folder import RunFolder

_SHOWN = 20


@dataclass
class Difference:
    """Rows in both, rows with the same prompt and other fields (by field and values), rows in one alone. False when
    the two are equal."""

    names: tuple[str, str]
    same: int = 0
    changed: int = 0
    fields: Counter[str] = field(default_factory=Counter)
    alone: tuple[int, int] = (0, 0)
    settings: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.changed or any(self.alone) or self.settings)

    def lines(self) -> Iterator[str]:
        yield f"{self.same} rows in both"
        if self.changed:
            yield f"{self.changed} rows of the same prompt differ:"
            yield from (f"  {text}: {count}" for text, count in self.fields.most_common(_SHOWN))
        for name, count in zip(self.names, self.alone, strict=True):
            if count:
                yield f"{count} rows in {name} alone"
        yield from self.settings


def compare(first: Run, second: Run) -> Difference:
    """Memory: a few dozen bytes for each row of the runs. Raises StorageError when a plan cannot be read."""
    found = Difference((first.name, second.name))
    left = Counter(key for key, _ in _rows(first))
    shared: Counter[bytes] = Counter()
    others: dict[bytes, list[dict[str, JsonValue]]] = {}
    for key, request in _rows(second):
        if shared[key] < left[key]:
            shared[key] += 1
        else:
            others.setdefault(_prompt(request), []).append(request)
    found.same = shared.total()
    only_first = 0
    for key, request in _rows(first):
        if shared[key]:
            shared[key] -= 1
        elif rivals := others.get(_prompt(request)):
            found.changed += 1
            found.fields.update(_changes(request, rivals.pop()))
        else:
            only_first += 1
    found.alone = (only_first, sum(map(len, others.values())))
    for name in ("model", "format", "gates", "accept", "redraws"):
        values = getattr(first.spec, name), getattr(second.spec, name)
        if values[0] != values[1]:
            found.settings.append(f"{name}: {values[0]} and {values[1]}")
    return found


def _rows(run: Run) -> Iterator[tuple[bytes, dict[str, JsonValue]]]:
    with closing(open_storage(run.spec.target)) as storage:
        for _, job in RunFolder(storage, run.name).rows(0):
            request = _request(job)
            yield hashlib.sha256(json.dumps(request, sort_keys=True).encode()).digest()[:16], request


def _request(job: Job) -> dict[str, JsonValue]:
    dumped: dict[str, JsonValue] = job.model_dump(mode="json", exclude={"id", "run"})
    for name in ("params", "output"):
        part = dumped.pop(name)
        assert isinstance(part, dict)
        part.pop("prefix", None)
        dumped |= {f"{name}.{key}": value for key, value in part.items()}
    return dumped


def _prompt(request: dict[str, JsonValue]) -> bytes:
    return hashlib.sha256(str(request["prompt"]).encode()).digest()[:16]


def _changes(first: dict[str, JsonValue], second: dict[str, JsonValue]) -> Iterator[str]:
    for name in sorted({*first, *second}):
        if first.get(name) != second.get(name):
            if name in ("seed", "negative_prompt"):  # too many values to count by, or too long
                yield name
            else:
                yield f"{name} {json.dumps(first.get(name))} and {json.dumps(second.get(name))}"
