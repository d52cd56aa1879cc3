"""From a manifest to a run in the ledger: planned whole, refused whole, or registered and ready to be controlled."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from saggar.jobs.errors import ConfigError, InvalidJob, RunBusy, RunChanged, UnknownRun
from saggar.jobs.runs import LeaseLost, Run, RunLedger, RunSpec
from saggar.jobs.runs.ledger import changed_plan
from saggar.jobs.runs.plan import (
    CardOf,
    Expansion,
    parse_matrix,
    parse_pairs,
    parse_seeds,
    parse_value,
    place,
)
from saggar.storage.base import Storage
from saggar.storage.keys import RESULT_NAME
from saggar.workers.runs.drive import Heartbeat, Lease
from saggar.workers.runs.folder import RunFolder, RunIndex
from saggar.workers.runs.manifest import Manifest
from saggar.workers.runs.pack import is_packed, packed_keys


@dataclass(frozen=True)
class Flags:
    """What multiplies and fills rows, as it was typed: `sets` and `matrix` of name=value, `seeds` such as 0..3."""

    sets: Sequence[str] = ()
    seeds: str | None = None
    matrix: Sequence[str] = ()

    def expansion(self, run: str, model: str, prefix: str = "") -> Expansion:
        """Raises ConfigError."""
        defaults: dict[str, object] = {"model": model}
        for name, text in parse_pairs(self.sets, "--set").items():
            place(defaults, name, parse_value(text))
        return Expansion(run, defaults, parse_seeds(self.seeds), parse_matrix(self.matrix), prefix)


def check_flags(expansion: Expansion, card_of: CardOf) -> None:
    """A value of a flag that no row can have is told once. Raises ConfigError."""
    named = {name for name, _ in expansion.matrix} | {f"params.{name}" for name, _ in expansion.matrix}
    named |= {name for name in expansion.defaults if name != "model"}
    named |= {f"params.{name}" for name in _dict(expansion.defaults, "params")}
    named |= {f"output.{name}" for name in _dict(expansion.defaults, "output")}
    probe = replace(expansion, seeds=expansion.seeds[:1])
    defaults = {"prompt": "", **expansion.defaults}
    try:
        for _ in replace(probe, defaults=defaults).jobs({}, card_of):
            pass
    except InvalidJob as error:
        if error.field.partition("[")[0] in named | {"model"}:
            raise ConfigError(f"--set or --matrix: {error}") from None


@dataclass(frozen=True)
class Estimate:
    """What an earlier run of the model says about a new one: seconds and bytes of `rows` rows, by run `name`."""

    name: str
    seconds: float
    bytes: float


def estimate(runs: RunLedger, model: str, rows: int) -> Estimate | None:
    """None: no run of this model is known that says anything."""
    for run in runs.list():
        if run.spec.model == model and run.rate > 0 and run.done:
            return Estimate(run.name, rows / run.rate, run.bytes / run.done * rows)
    return None


def register(
    runs: RunLedger, folder: RunFolder, manifest: Manifest, spec: RunSpec, *, extend: bool = False
) -> Run:
    """Makes a plan of the manifest, next to the output, and a run of it in the ledger; or finds both. A run that was
    paused goes on; rows that failed or were cancelled are made again.

    Raises RunChanged, RunBusy, QueueFull, StorageError.
    """
    run, index = _known(runs, spec.name), folder.index(fresh=True)
    if run is not None and run.spec.target != spec.target:
        raise RunChanged(
            f"run {spec.name} writes to {run.spec.target} (allowed: the same --to, or another --name)"
        )
    if run is not None:
        _refuse_other_ways(run.spec, spec)
    if run is not None and index is None:
        raise RunChanged(
            f"run {spec.name} is known, and its plan is gone from {spec.target} (allowed: another --name, or saggar "
            f"runs forget {spec.name})"
        )
    if index is None:
        _first_plan(folder, manifest, spec)
    elif run is None and index.spec.digest != spec.digest and not extend:
        raise changed_plan(spec.name)
    elif run is None:
        run = _adopt(runs, folder, index, spec)
    digest = run.digest if run else spec.digest
    if run is not None and digest != spec.digest and extend:
        return _extend(runs, folder, manifest, run, spec)
    runs.open(spec)
    return _wake(runs, folder, spec.name)


def _first_plan(folder: RunFolder, manifest: Manifest, spec: RunSpec) -> None:
    if folder.write_plan(spec, manifest.lines()).spec.digest != spec.digest:
        raise RunChanged(
            f"run {spec.name} was planned from another manifest by somebody else at this moment (allowed: another "
            "--name)"
        )


def _refuse_other_ways(old: RunSpec, new: RunSpec) -> None:
    """What a run makes of its rows stays as it began: half of a data set under other gates would be neither."""
    for name in ("model", "format", "gates", "accept"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            raise RunChanged(
                f"run {old.name} was begun with {name} {_shown(before)}, not {_shown(after)} (allowed: the same, or "
                "another --name)"
            )


def _shown(value: object) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


def _known(runs: RunLedger, name: str) -> Run | None:
    try:
        return runs.get(name)
    except UnknownRun:
        return None


def _adopt(runs: RunLedger, folder: RunFolder, index: RunIndex, spec: RunSpec) -> Run:
    """The target knows the run and this Redis does not: what is whole in the target is done. Of single objects with
    gates nothing is: what was accepted, only the old Redis knew."""
    old = spec.model_copy(update={"digest": index.spec.digest, "planned": index.planned, "detached": False})
    rows = ""
    if spec.format != "objects":
        packed = packed_keys(folder.storage, spec.name)
        there = (is_packed(job.id, spec.accept or job.num_outputs, packed) for _, job in folder.rows(0))
        rows = "".join("p" if one else "." for one in there)
    elif not spec.gates:
        made = {key.split("/")[-2] for key in _results(folder.storage, spec.prefix)}
        rows = "".join("d" if job_id in made else "." for job_id in folder.ids())
    runs.open(old, rows)
    return runs.get(spec.name)


def _results(storage: Storage, prefix: str) -> Iterator[str]:
    return (info.key for info in storage.list(prefix) if info.key.endswith(f"/{RESULT_NAME}"))


def _extend(runs: RunLedger, folder: RunFolder, manifest: Manifest, run: Run, spec: RunSpec) -> Run:
    with _held(runs, run.name) as token:
        run = runs.get(run.name)  # as it is now that nobody else extends it
        folder.mend(run.digest, run.planned, partial(runs.hold, run.name, token))
        index = folder.index(fresh=True)
        assert index is not None
        more, digest = manifest.only_new(folder.ids())
        spec = spec.model_copy(update={"digest": digest, "planned": run.planned + more})
        if more:
            runs.reopen(run.name)  # first: a run that is done has its `_SUCCESS`
            folder.unfinish()
            folder.write_plan(spec, manifest.lines(), index)
            runs.extend(spec, token, run.digest, more)
        else:
            runs.open(spec)
    return _wake(runs, folder, run.name)


@contextmanager
def _held(runs: RunLedger, name: str) -> Iterator[str]:
    """The run's lease, kept however long it takes. Raises RunBusy."""
    busy = RunBusy(f"run {name} is controlled by somebody at this moment: pause it first, or try again")
    token = f"extend-{uuid.uuid4().hex}"
    if not runs.claim(name, token):
        raise busy
    try:
        with Heartbeat(Lease(runs, name, token)):
            yield token
    except LeaseLost:
        raise busy from None


def _wake(runs: RunLedger, folder: RunFolder, name: str) -> Run:
    """What somebody started again shall go on. Its controller takes `_SUCCESS` away."""
    run = runs.get(name)
    if run.failed or run.cancelled:
        runs.again(name, ["failed", "cancelled"])
    elif run.state == "done" and not folder.succeeded():
        runs.reopen(name)  # a run is done when its `_SUCCESS` is there
    if run.state == "paused":
        runs.change(name, "running")
    return runs.get(name)


def _dict(row: dict[str, object], name: str) -> dict[str, object]:
    part = row.get(name)
    return part if isinstance(part, dict) else {}


__all__ = ["Estimate", "Flags", "check_flags", "estimate", "register"]
