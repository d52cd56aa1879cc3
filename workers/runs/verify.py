"""Reading everything of a store again and holding it against its hashes: results by `result.json`, shards by index.

What is compared: each object that a result names; each shard against its index, the rows that it holds too; the total
index and `_SUCCESS` against the indexes; each run's plan against its `run.json`. Objects in a job's or a run's folder
or among shards that nobody names are extra. Other objects are counted and left alone. Nothing is written.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby, islice

from pydantic import JsonValue
from saggar.storage.base import ObjectInfo, Storage
from saggar.storage.errors import Conflict, NotFound
from saggar.storage.keys import RESULT_NAME, parse_attempt
from saggar.storage.results import ManifestFile, ManifestOutput, ResultManifest, read_result
from saggar.workers.runs.findings import Finding, Part, Pick, check_bytes, rank, read
from saggar.workers.runs.outputs import leads
from saggar.workers.runs.verify_plan import check_run, run_of
from saggar.workers.runs.verify_shards import check_set, closing_keys, set_of

Advance = Callable[[int, int], None]
"""Told how many objects, and how many bytes, were checked since the last call."""
_THREADS = 8
_AHEAD = 64  # jobs in the hands of the threads


@dataclass
class Verified:
    """What was found. `objects` and `bytes` were read and compared; `others` were left alone."""

    results: int = 0
    runs: int = 0
    shards: int = 0
    rows: int = 0
    objects: int = 0
    bytes: int = 0
    others: int = 0
    findings: list[Finding] = field(default_factory=list)
    picks: list[Pick] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.findings

    def to_json(self) -> dict[str, JsonValue]:
        """Plain JSON values; `findings` in the order of their keys."""
        counts = Counter(finding.kind for finding in self.findings)
        return {
            **{
                name: getattr(self, name)
                for name in ("results", "runs", "shards", "rows", "objects", "bytes", "others")
            },
            **{kind: counts[kind] for kind in ("missing", "wrong", "extra")},
            "clean": self.clean,
            "findings": [
                {"key": finding.key, "kind": finding.kind, "why": finding.why} for finding in self.findings
            ],
        }


def verify(storage: Storage, *, picks: int = 0, advance: Advance = lambda objects, size: None) -> Verified:
    """Reads all that is under the store's root. `picks` samples are chosen among those that are whole, always the same.

    Memory: the objects of a few dozen jobs, one shard, and the findings. Raises what a store raises when it is away.
    """
    report = Verified()
    sets: dict[str, list[ObjectInfo]] = {}
    runs: dict[str, list[ObjectInfo]] = {}
    others: set[str] = set()
    with ThreadPoolExecutor(_THREADS, "saggar-verify") as pool:
        jobs = _jobs(storage, sets, runs, others)
        while ahead := list(islice(jobs, _AHEAD)):
            for part in pool.map(lambda job: check_job(storage, *job), ahead):
                _add(report, part, picks, advance)
    report.others = len(others - closing_keys(sets))
    for base, found in sorted(sets.items()):
        for part in check_set(storage, base, found):
            _add(report, part, picks, advance)
    for base, found in sorted(runs.items()):
        _add(report, check_run(storage, base, found), picks, advance)
    report.findings.sort()
    report.picks.sort()
    return report


def survey(storage: Storage) -> tuple[int, int]:
    """How many objects there are and their bytes: for a progress bar's end."""
    count = size = 0
    for info in storage.list(""):
        count += 1
        size += info.size
    return count, size


def check_job(storage: Storage, base: str, found: Mapping[str, ObjectInfo]) -> Part:
    """One job's folder: `found` is what lies there, by key."""
    key = f"{base}/{RESULT_NAME}"
    part = Part(objects=len(found), bytes=sum(info.size for info in found.values()))
    if key not in found:
        part.findings += [Finding(extra, "extra", "no result.json names it") for extra in found]
        return part
    try:
        manifest = read_result(storage, key)
        named = {_local_key(base, manifest, file): file for file in manifest.files()}
    except (Conflict, NotFound) as error:
        part.findings.append(Finding(key, "wrong", str(error)))
        return part
    part.results = 1
    for name, file in named.items():
        data = read(storage, name) if name in found else None
        part.findings += check_bytes(name, file.size, file.sha256, data)
    part.findings += [
        Finding(extra, "extra", "result.json does not name it")
        for extra in found
        if extra not in named and extra != key
    ]
    spoilt = {finding.key for finding in part.findings}
    for name, file in named.items():
        if isinstance(file, ManifestOutput) and leads(file) and name not in spoilt:
            part.picks.append(Pick(rank(f"{manifest.job_id}/{file.index}"), base, output=file))
    return part


def _add(report: Verified, part: Part, picks: int, advance: Advance) -> None:
    for name in ("results", "runs", "shards", "rows", "objects", "bytes"):
        setattr(report, name, getattr(report, name) + getattr(part, name))
    report.findings += part.findings
    report.picks = heapq.nsmallest(picks, [*report.picks, *part.picks])
    advance(part.objects, part.bytes)


def _jobs(
    storage: Storage,
    sets: dict[str, list[ObjectInfo]],
    runs: dict[str, list[ObjectInfo]],
    others: set[str],
) -> Iterator[tuple[str, dict[str, ObjectInfo]]]:
    """Jobs' folders with what lies in them, which a listing keeps together; what is of shards goes into `sets` by its
    base, what is a run's own into `runs`, and what is nobody's into `others`.
    """
    for (kind, base), infos in groupby(storage.list(""), key=lambda info: _owner(info.key)):
        if kind == "job":
            yield base, {info.key: info for info in infos}
        elif kind == "set":
            sets.setdefault(base, []).extend(infos)
        elif kind == "run":
            runs.setdefault(base, []).extend(infos)
        else:
            others.update(info.key for info in infos)


def _owner(key: str) -> tuple[str, str]:
    """Whose object it is: of a job (its folder), of a set of shards (its base), of a run (its folder), or of somebody
    else."""
    if (base := set_of(key)) is not None:
        return "set", base
    if (found := parse_attempt(key)) is not None:
        return "job", found.job_prefix
    if (base := run_of(key)) is not None:
        return "run", base
    folder, _, name = key.rpartition("/")
    return ("job", folder) if folder and name == RESULT_NAME else ("other", "")


def _local_key(base: str, manifest: ResultManifest, file: ManifestFile) -> str:
    """A named object's key under this root, which may lie deeper than the worker's. Raises Conflict."""
    parsed = parse_attempt(file.key)
    if parsed is None or parsed.job_id != manifest.job_id or base.rpartition("/")[2] != manifest.job_id:
        raise Conflict(f"{base}/{RESULT_NAME} names {file.key}, which is not in the folder of its job")
    return base + file.key.removeprefix(parsed.job_prefix)
