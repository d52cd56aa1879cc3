"""From a row of a manifest to the jobs that it stands for: defaults, seeds, a matrix of parameters, ids. Pure.

A row's id is a hash of the run, of the request as its card completes it, of the model's revision and of the numerics
class: the same row is the same job, and a row that changed in any of these is another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import product

from saggar.jobs.cards import ModelCard, completed
from saggar.jobs.errors import ConfigError, InvalidJob
from saggar.jobs.schema import MAX_SEED, NAME_ALLOWED, Job, check_id, parse_job

Row = dict[str, object]
CardOf = Callable[[Job], ModelCard | None]
"""The card that a job is checked against; None: it is queued unchecked. Raises UnknownModel."""

JOB_FIELDS = frozenset(Job.model_fields) - {
    "version",
    "params",
    "inputs",
    "output",
    "loras",
    "run",
    "idempotency_key",
}
INPUTS = ("image", "mask", "audio", "video")
OUTPUT = ("format", "quality")
MOST_SEEDS = 100_000
_NAMED = 56  # characters of a row's own id that its job's id keeps


@dataclass(frozen=True)
class Expansion:
    """What rows become in a run. `defaults`: a row (see `place`) for what rows do not say; `seeds` and `matrix`
    multiply each row; `prefix` stands in front of the keys of what is made, and is no part of the id."""

    run: str
    defaults: Row
    seeds: tuple[int, ...] = ()
    matrix: tuple[tuple[str, tuple[object, ...]], ...] = ()
    prefix: str = ""
    models: tuple[str, ...] = field(init=False)
    """Models that the flags name: the default one, and those of the matrix."""

    def __post_init__(self) -> None:
        of_matrix = next((values for name, values in self.matrix if name == "model"), ())
        named = tuple(map(str, of_matrix)) or (str(self.defaults["model"]),)
        object.__setattr__(self, "models", named)

    @property
    def seed_stride(self) -> int:
        return max(self.seeds) - min(self.seeds) + 1 if self.seeds else 0

    def jobs(self, row: Row, card_of: CardOf) -> Iterator[Job]:
        """The jobs of a row, checked and complete. Raises InvalidJob."""
        merged = _merged(self.defaults, row)
        for values in product(*(values for _, values in self.matrix)):
            one = _merged({}, merged)
            for (name, _), value in zip(self.matrix, values, strict=True):
                _refuse_both(row, name, "--matrix")
                place(one, name, value)
            if not self.seeds:
                yield self._job(one, card_of)
            for seed in self.seeds:
                _refuse_both(row, "seed", "--seeds")
                yield self._job({**one, "seed": seed}, card_of)

    def _job(self, row: Row, card_of: CardOf) -> Job:
        own = row.get("id")
        if own is not None:
            if not isinstance(own, str):
                raise InvalidJob("id", "must be a string", NAME_ALLOWED)
            check_id(own)
        if row.get("run") not in (None, self.run):
            raise InvalidJob("run", "is another one", "the run's name is given by --name")
        if row.get("idempotency_key") is not None:  # it would lead to another row's job
            raise InvalidJob(
                "idempotency_key", "is none of a row's", "leave it out: the same row is the same job"
            )
        asked = parse_job({**row, "id": "row", "run": self.run})
        if asked.seed is None:  # of its content and the run: the same command makes the same pictures
            digest = sha256(f"{self.run}\n{asked.digest()}".encode()).hexdigest()
            asked = asked.model_copy(update={"seed": int(digest[:8], 16)})
        card = card_of(asked)
        job = completed(asked, card)
        name = row_id(job, card)
        if own is not None:
            name = f"{own[:_NAMED]}-{name[:12]}"
        output = job.output.model_copy(update={"prefix": self.prefix}) if self.prefix else job.output
        job = job.model_copy(update={"id": name, "output": output})
        job.to_json()  # refuses one that is too large
        return job


def row_id(job: Job, card: ModelCard | None) -> str:
    """32 hexadecimal digits over the run, the completed request, the model's revision and the numerics class."""
    build = [card.revision, card.numerics] if card else []
    text = json.dumps([job.run, job.digest(), *build])
    return sha256(text.encode()).hexdigest()[:32]


def place(row: Row, name: str, value: object) -> None:
    """Puts a value where its name belongs: a job's own field, a kind of input, the output's form, else a parameter of
    the model. Changes `row`."""
    if name in JOB_FIELDS:
        row[name] = value
    elif name.removeprefix("inputs.") in INPUTS:
        uris = value if isinstance(value, list) else [value]
        row["inputs"] = {**_part(row, "inputs"), name.removeprefix("inputs."): uris}
    elif name.removeprefix("output.") in OUTPUT:
        row["output"] = {**_part(row, "output"), name.removeprefix("output."): value}
    else:
        row["params"] = {**_part(row, "params"), name.removeprefix("params."): value}


def parse_value(text: str) -> object:
    """JSON where it can be read as such, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # ValueError alone: a number of more digits than Python reads
        return text


def parse_settings(pairs: Sequence[str]) -> dict[str, object]:
    """`--set steps=28` pairs as parameters. Raises ConfigError."""
    return {name: parse_value(text) for name, text in parse_pairs(pairs, "--set").items()}


def parse_pairs(pairs: Sequence[str], flag: str) -> dict[str, str]:
    """`name=value` pairs. Raises ConfigError."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise ConfigError(f"{flag} {pair}: write it as name=value, such as num_inference_steps=28")
        if name in found:
            raise ConfigError(f"{flag} {name} is given twice")
        found[name] = value
    return found


def parse_seeds(text: str | None) -> tuple[int, ...]:
    """`0..3` (with its ends), `7` or `1,5,9`. Raises ConfigError."""
    allowed = f"such as 0..3 or 1,5,9: at most {MOST_SEEDS} seeds from 0 to {MAX_SEED}, each once"
    if text is None:
        return ()
    seeds: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        numbers = (first, last) if dots else (first, first)
        if not all(number.isascii() and number.isdecimal() and len(number) < 20 for number in numbers):
            raise ConfigError(f"--seeds {text}: write it {allowed}")
        low, high = map(int, numbers)
        if low > high or high > MAX_SEED or high - low >= MOST_SEEDS:
            raise ConfigError(f"--seeds {text}: write it {allowed}")
        seeds += range(low, high + 1)
    if len(seeds) > MOST_SEEDS or len(set(seeds)) != len(seeds):
        raise ConfigError(f"--seeds {text}: write it {allowed}")
    return tuple(seeds)


def parse_matrix(pairs: Sequence[str]) -> tuple[tuple[str, tuple[object, ...]], ...]:
    """`name=value,value,...` pairs; values as in --set. Raises ConfigError."""
    axes = []
    for name, text in parse_pairs(pairs, "--matrix").items():
        values = tuple(parse_value(part) for part in text.split(","))
        if len({repr(value) for value in values}) != len(values) or "" in values:
            raise ConfigError(f"--matrix {name}={text}: write different values, such as guidance_scale=3,5")
        if name in ("id", "run", "seed"):
            raise ConfigError(
                f"--matrix {name}: cannot be multiplied" + (", use --seeds" if name == "seed" else "")
            )
        axes.append((name, values))
    return tuple(axes)


def _merged(defaults: Mapping[str, object], row: Mapping[str, object]) -> Row:
    """The row over the defaults, its objects merged field by field."""
    merged: Row = {**defaults, **row}
    for name in ("params", "output", "inputs"):
        own, common = row.get(name), defaults.get(name)
        if isinstance(own, dict) and isinstance(common, dict):
            merged[name] = {**common, **own}
        elif isinstance(merged.get(name), dict):
            merged[name] = dict(merged[name])  # type: ignore[call-overload]
    return merged


def _refuse_both(row: Row, name: str, flag: str) -> None:
    params = row.get("params")
    if row.get(name) is not None or (isinstance(params, dict) and name.removeprefix("params.") in params):
        raise InvalidJob(name, f"the row has one of its own and {flag} gives others", "one of the two")


def _part(row: Row, name: str) -> dict[str, object]:
    part = row.get(name)
    return part if isinstance(part, dict) else {}
