"""Quality gates: named checks that a picture must pass to count. Same pictures in the same order, same verdicts.

    gates = parse_gates(["black", "near_duplicate:distance=6", "aesthetic>=5"])
    judgement = gates.judge(Candidate.of_file(row_id, data, prompt))

| gate | value | passes when |
|---|---|---|
| `nan` | share of values that are NaN or infinite; 0 for pictures of bytes | value <= 0 |
| `black` | brightness that all but the brightest thousandth stay below, 0 to 255 | value >= 8 |
| `blank` | the largest standard deviation of a colour channel, 0 to 127.5 | value >= 2 |
| `min_bytes` | size of the encoded file | value >= 512 |
| `near_duplicate` | least Hamming distance to an accepted picture's 256-bit dHash | value > 10 |

Everything else is a scorer: an entry point of the group `saggar.scorers`, installed with a package of its own. It is
called with the options of `--gate` and returns a `Scorer`. Nothing is loaded from a path or a job.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from saggar.jobs.errors import ConfigError, SaggarError
from saggar.workers.inputs.sniff import kind_of
from saggar.workers.runs.duplicates import BITS, NearDuplicates, fingerprint
from saggar.workers.stills import SOUNDS, still_of

SCORERS = "saggar.scorers"
Pixels = NDArray[np.uint8] | NDArray[np.floating]
Option = bool | int | float | str

_SPEC = re.compile(
    r"(?P<name>[A-Za-z_][\w.-]*)(:(?P<options>.*?))?((?P<sign>>=|<=)(?P<bound>[^<>=]+))?", re.S
)


class GateError(SaggarError):
    """A scorer raised, or gave something that is no number: the picture was not judged."""


@dataclass(frozen=True)
class Candidate:
    """A picture before the gates: H×W×3, uint8 or float in 0..1. `size` is its encoded file's, in bytes."""

    key: str
    array: Pixels
    size: int
    prompt: str = ""

    @classmethod
    def of_file(cls, key: str, data: bytes, prompt: str = "") -> Candidate:
        """From a picture's file, or a video's, of which four frames side by side are judged.

        Raises PIL.UnidentifiedImageError, OSError or ValueError when it cannot be decoded, GateError for a sound.
        """
        if kind_of(io.BytesIO(data)) in SOUNDS:
            raise GateError("a sound has no picture that a gate could judge")
        return cls(key, still_of(data), len(data), prompt)

    def pixels(self) -> NDArray[np.uint8]:
        """As bytes: floats are scaled by 255, NaN is black."""
        if self.array.dtype == np.uint8:
            return np.asarray(self.array, np.uint8)
        bounded = np.clip(np.nan_to_num(self.array, nan=0.0, posinf=1.0, neginf=0.0), 0, 1)
        return np.asarray(np.round(bounded * 255), np.uint8)


@dataclass(frozen=True)
class Verdict:
    """What a gate says: `value` was held against `threshold`. `like` is the key of the picture that it resembles."""

    name: str
    passed: bool
    value: float
    threshold: float
    like: str | None = None


@dataclass(frozen=True)
class Judgement:
    """All verdicts up to the first that failed. `fingerprint` is what `Gates.restore` wants after a restart."""

    verdicts: tuple[Verdict, ...]
    fingerprint: str | None = None

    @property
    def rejected_by(self) -> Verdict | None:
        return next((verdict for verdict in self.verdicts if not verdict.passed), None)

    @property
    def accepted(self) -> bool:
        return self.rejected_by is None


class Scorer(Protocol):
    """What an entry point's factory returns: a number for a picture (uint8, H×W×3) and its prompt.

    Equal inputs must give equal numbers.
    """

    def __call__(self, picture: NDArray[np.uint8], prompt: str) -> float: ...


class Gate(Protocol):
    @property
    def name(self) -> str: ...
    def judge(self, candidate: Candidate) -> Verdict: ...


@dataclass(frozen=True)
class Measured:
    """A gate that compares a measure of the picture with a threshold; NaN never passes."""

    name: str
    measure: Callable[[Candidate], float]
    threshold: float
    at_most: bool = False

    def judge(self, candidate: Candidate) -> Verdict:
        value = self.measure(candidate)
        passed = value <= self.threshold if self.at_most else value >= self.threshold
        return Verdict(self.name, passed, value, self.threshold)


@dataclass(frozen=True)
class Distinct:
    """Refuses what resembles a picture that was accepted before."""

    seen: NearDuplicates
    name: str = "near_duplicate"

    def judge(self, candidate: Candidate) -> Verdict:
        distance, like = self.seen.nearest(candidate.key, fingerprint(candidate.pixels()))
        passed = distance > self.seen.distance
        return Verdict(self.name, passed, distance, self.seen.distance, None if passed else like)


@dataclass
class Gates:
    """All gates of a run, in the order given. One thread uses it; the order of `judge` is part of the result."""

    gates: Sequence[Gate]

    def judge(self, candidate: Candidate) -> Judgement:
        """Stops at the first gate that refuses. Only accepted pictures are remembered. Raises GateError."""
        verdicts: list[Verdict] = []
        for gate in self.gates:
            verdicts.append(gate.judge(candidate))
            if not verdicts[-1].passed:
                return Judgement(tuple(verdicts))
        known = [gate.seen for gate in self.gates if isinstance(gate, Distinct)]
        mark = fingerprint(candidate.pixels()) if known else None
        for seen in known:
            seen.remember(candidate.key, mark or b"")
        return Judgement(tuple(verdicts), mark.hex() if mark else None)

    def restore(self, key: str, mark: str) -> None:
        """Remembers a picture that was accepted before a restart, by the fingerprint of its judgement."""
        for gate in self.gates:
            if isinstance(gate, Distinct):
                gate.seen.remember(key, bytes.fromhex(mark))


@dataclass
class _Spec:
    """`--gate` taken apart; options are taken out as they are used."""

    text: str
    name: str
    sign: str | None
    bound: float | None
    options: dict[str, Option] = field(default_factory=dict)

    def number(self, option: str, default: float) -> float:
        value = self.options.pop(option, default)
        if isinstance(value, bool | str):
            raise ConfigError(f"--gate {self.text}: {option} is a number, not {value!r}")
        return value

    def threshold(self, option: str, default: float) -> float:
        """Of a gate that wants at least so much, by `>=` or by the option's name."""
        if self.sign == "<=":
            raise ConfigError(f"--gate {self.text}: {self.name} is written {self.name}>=number")
        return self.number(option, default) if self.bound is None else self.bound


def parse_gates(specs: Sequence[str]) -> Gates:
    """`NAME`, `NAME:option=value,option=value`, `NAME>=number`, `NAME<=number`; values are JSON or else text.

    Raises ConfigError naming what exists: for a name that is neither a gate nor an installed scorer, an option that
    the gate does not have, or a threshold that is no number.
    """
    return Gates([_gate(_split(spec)) for spec in specs])


def gate_names() -> list[str]:
    """Built-in gates and installed scorers."""
    return sorted({*_BUILT_IN, *entry_points(group=SCORERS).names})


def _split(text: str) -> _Spec:
    found = _SPEC.fullmatch(text)
    if found is None:
        raise ConfigError(f"--gate {text}: write it as NAME, NAME:option=value or NAME>=number")
    options: dict[str, Option] = {}
    for pair in filter(None, (found["options"] or "").split(",")):
        name, separator, value = pair.partition("=")
        if not separator or not name.isidentifier():
            raise ConfigError(f"--gate {text}: {pair!r} is not option=value")
        options[name] = _value(value)
    return _Spec(text, found["name"], found["sign"], _bound(text, found["bound"]), options)


def _bound(text: str, bound: str | None) -> float | None:
    if bound is None:
        return None
    try:
        number = float(bound)
    except ValueError:
        number = float("nan")
    if not np.isfinite(number):
        raise ConfigError(f"--gate {text}: {bound!r} is no number")
    return number


def _value(text: str) -> Option:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float) else text


def _gate(spec: _Spec) -> Gate:
    make = _BUILT_IN.get(spec.name)
    if make is None:
        return _scorer(spec)
    gate = make(spec)
    if spec.options:
        raise ConfigError(f"--gate {spec.text}: {spec.name} has no option {next(iter(spec.options))!r}")
    return gate


def _scorer(spec: _Spec) -> Gate:
    found = tuple(entry_points(group=SCORERS, name=spec.name))
    if not found:
        raise ConfigError(f"--gate {spec.text}: no gate {spec.name!r}; there are {', '.join(gate_names())}")
    if spec.bound is None:
        raise ConfigError(f"--gate {spec.text}: a scorer needs its threshold: {spec.name}>=number")
    scorer = _load(spec, found[0])

    def measure(candidate: Candidate) -> float:
        try:
            return float(scorer(candidate.pixels(), candidate.prompt))
        except Exception as error:
            raise GateError(f"gate {spec.name}: {type(error).__name__} for {candidate.key}") from error

    return Measured(spec.name, measure, spec.bound, at_most=spec.sign == "<=")


def _load(spec: _Spec, entry: EntryPoint) -> Scorer:
    try:
        scorer: Scorer = entry.load()(**spec.options)
    except Exception as error:  # whatever a package does when it is imported or set up
        raise ConfigError(
            f"--gate {spec.text}: {entry.value} failed: {type(error).__name__}: {error}"
        ) from error
    return scorer


def _nan(candidate: Candidate) -> float:
    return 0.0 if candidate.array.dtype == np.uint8 else float(np.mean(~np.isfinite(candidate.array)))


def _brightness(candidate: Candidate) -> float:
    return float(np.percentile(candidate.pixels().max(axis=2), 99.9))


def _deviation(candidate: Candidate) -> float:
    return float(candidate.pixels().std(axis=(0, 1), dtype=np.float64).max())


def _distinct(spec: _Spec) -> Gate:
    if spec.bound is not None:
        raise ConfigError(f"--gate {spec.text}: write it as near_duplicate:distance=N")
    distance, memory = spec.number("distance", 10), spec.number("memory", 1_000_000)
    if not 0 <= distance < BITS or memory < 1:
        raise ConfigError(f"--gate {spec.text}: distance is 0 to {BITS - 1}, memory at least 1")
    return Distinct(NearDuplicates(int(distance), int(memory)))


def _at_least(measure: Callable[[Candidate], float], option: str, default: float) -> Callable[[_Spec], Gate]:
    def make(spec: _Spec) -> Gate:
        threshold = spec.threshold(option, default)
        if threshold < 0:
            raise ConfigError(f"--gate {spec.text}: {option} is 0 or more: nothing is less")
        return Measured(spec.name, measure, threshold)

    return make


def _no_nan(spec: _Spec) -> Gate:
    if spec.bound is not None:
        raise ConfigError(f"--gate {spec.text}: nan takes no threshold")
    return Measured(spec.name, _nan, 0.0, at_most=True)


_BUILT_IN: Mapping[str, Callable[[_Spec], Gate]] = {
    "nan": _no_nan,
    "black": _at_least(_brightness, "level", 8),
    "blank": _at_least(_deviation, "deviation", 2),
    "min_bytes": _at_least(lambda candidate: candidate.size, "bytes", 512),
    "near_duplicate": _distinct,
}
