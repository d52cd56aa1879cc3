"""Rows that are done go into shards, each once, whoever is killed when.

A row is settled before it is packed, and marked as packed after its shard is there. After a crash the rows that are
done and not marked are offered again; those that stand in a shard already are passed over.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby, islice
from typing import cast

from pydantic import JsonValue
from saggar.jobs.client import JobClient
from saggar.jobs.record import JobRecord
from saggar.jobs.runs import Controller, RunSpec
from saggar.jobs.runs.controller import EVENTS
from saggar.jobs.runs.rows import chunks
from saggar.storage.base import Storage
from saggar.storage.errors import Conflict, NotFound
from saggar.storage.results import ManifestFile, ManifestOutput
from saggar.storage.samples import Sample
from saggar.storage.shard_index import ShardKeys, index_numbers, read_index
from saggar.storage.shards import DEFAULT_TARGET_BYTES, ShardWriter
from saggar.workers.encode import FACTS
from saggar.workers.runs.folder import RunFolder
from saggar.workers.runs.judge import Draws, draws_of
from saggar.workers.runs.outputs import Made, Outputs, remove

log = logging.getLogger(__name__)
_CHUNK = 32
"""Rows whose pictures are in memory at a time."""
SHOWN = 64
"""Rows at the beginning whose single objects stay until the contact sheet is made."""
MOST_LOST = 3
"""How often what a row has made is made again when it is lost."""
_EXTENSIONS = {"image/png": "png", "image/webp": "webp", "image/jpeg": "jpg"}


@dataclass(frozen=True)
class Done:
    """A row to be packed: its number, the id of its first draw, and how many pictures it has, where all of that draw
    count."""

    n: int
    row_id: str
    pictures: int


@dataclass(frozen=True)
class Waiting:
    """A row that was added: the keys of its samples, its jobs, and where their single objects are."""

    keys: tuple[str, ...]
    job_ids: tuple[str, ...]
    made: tuple[Made, ...]


class Packer:
    """The shards of a run, under its name in the target. One thread uses it. Close it."""

    def __init__(
        self,
        spec: RunSpec,
        client: JobClient,
        controller: Controller,
        target: Storage,
        folder: RunFolder,
        outputs: Outputs,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._spec, self._client, self._controller = spec, client, controller
        self._target, self._folder, self._outputs, self._pool = target, folder, outputs, pool
        self._writer: ShardWriter | None = None
        self._shards = 0
        self._todo: dict[int, Done] = {}
        """By number: the rows that a start finds may have been taken already, and those that Redis went away before
        they were settled are taken twice."""
        self._waiting: dict[int, Waiting] = {}
        self._lost: Counter[int] = Counter()

    def take(self, rows: Sequence[Done]) -> None:
        """Rows that are about to be settled as done: packed at the next `tend`."""
        self._todo |= {row.n: row for row in rows}

    def restart(self) -> None:
        """Somebody else has had the run: what stands in shards, and what does not, is read anew."""
        self.close()
        self._writer, self._shards = None, 0
        self._todo.clear()
        self._waiting.clear()

    def tend(self) -> None:
        """Packs what there is. Raises StorageUnavailable: call it again, nothing is lost."""
        if self._writer is None:
            self._writer = self._open()
            self._todo = {row.n: row for row in self._left()} | self._todo
        while part := list(islice(self._todo.values(), _CHUNK)):
            self._add(part)
            for row in part:
                del self._todo[row.n]
            self._mark()

    def complete(self, *, success: bool) -> int | None:
        """Packs every row that is done, the last shard too; with `success` the total index and `_SUCCESS`. How many
        shards there are; None when pictures were lost, and their rows wait to be made again."""
        lost = self._lost.total()
        self.tend()
        self._todo |= {row.n: row for row in self._left() if row.n not in self._waiting}
        self.tend()
        if self._lost.total() > lost:
            return None
        assert self._writer is not None
        if success:
            self._writer.finish()
        else:
            self._writer.flush()
        self._mark()
        return len(self._writer.shards)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> ShardWriter:
        spec = self._spec
        return ShardWriter(
            self._target,
            spec.name,
            spec.format,
            target_bytes=spec.shard_bytes or DEFAULT_TARGET_BYTES,
            target_count=spec.shard_count,
            sole_writer=not self._target.conditional_put,  # then the run's lease is what there is
        )

    def _left(self) -> Iterator[Done]:
        """Rows that are done and not marked as packed."""
        numbers = self._controller.runs.rows_in(self._spec.name, "d")
        wanted = next(numbers, None)
        if wanted is None:
            return
        for n, job in self._folder.rows(wanted):
            if n == wanted:
                yield Done(n, job.id, job.num_outputs)
                wanted = next(numbers, None)
            if wanted is None:
                return

    def _add(self, rows: Sequence[Done]) -> None:
        """Rows that are not done, or packed by now, are passed over: they come again, or need not."""
        assert self._writer is not None
        runs, name = self._controller.runs, self._spec.name
        letters = runs.letters(name, [row.n for row in rows])
        rows = [row for row, x in zip(rows, letters, strict=True) if x == "d" and row.n not in self._waiting]
        picks = runs.picks(name, [row.n for row in rows])
        draws = [draws_of(row.row_id, text) for row, text in zip(rows, picks, strict=True)]
        rows, draws = self._not_packed(rows, draws)
        records = self._records([job_id for draw in draws for job_id in draw])
        found = list(self._pool.map(lambda row, draw: self._samples(row.row_id, draw, records), rows, draws))
        self._make_again(
            {
                row.n: [records.get(job_id) for job_id in draw]
                for row, draw, samples in zip(rows, draws, found, strict=True)
                if samples is None
            }
        )
        for row, draw, samples in zip(rows, draws, found, strict=True):
            if samples is None:
                continue
            made, ready = samples
            for sample in ready:
                self._writer.add(sample)
            self._waiting[row.n] = Waiting(tuple(one.key for one in ready), tuple(draw), made)

    def _not_packed(self, rows: Sequence[Done], draws: Sequence[Draws]) -> tuple[list[Done], list[Draws]]:
        """Those that stand in no shard. The others need only be marked, and their single objects may be gone."""
        assert self._writer is not None
        left: list[tuple[Done, Draws]] = []
        for row, draw in zip(rows, draws, strict=True):
            pictures = sum(row.pictures if wanted is None else len(wanted) for wanted in draw.values())
            if is_packed(row.row_id, pictures, self._writer.packed):
                self._waiting[row.n] = Waiting(tuple(sample_keys(row.row_id, pictures)), tuple(draw), ())
                self._shards = -1  # there is something to mark
            else:
                left.append((row, draw))
        return [row for row, _ in left], [draw for _, draw in left]

    def _make_again(self, lost: Mapping[int, Sequence[JobRecord | None]]) -> None:
        """Rows whose pictures are gone, or others than they were: their results and records go too, or the same jobs
        would be found again as they are. Raises Conflict for what is lost again and again."""
        if not lost:
            return
        if worst := [n for n in lost if self._lost[n] >= MOST_LOST]:
            raise Conflict(f"the pictures of row {worst[0]} were made again {MOST_LOST} times, and are gone")
        runs, name = self._controller.runs, self._spec.name
        # First: after a crash they are found again. Whatever is not done any more is not taken from.
        moved = runs.pack(name, self._controller.token, list(lost), ".")
        self._lost.update(moved)
        if moved:
            log.warning("run %s: pictures of %d rows are lost, and made again", name, len(moved))
        records = [record for n in moved for record in lost[n] if record is not None]
        for record in records:
            self._outputs.forget(record, self._spec)
        for part in chunks([record.id for record in records], 500):
            runs.forget(name, part, events=EVENTS, token=self._controller.token)

    def _records(self, job_ids: Sequence[str]) -> dict[str, JobRecord]:
        found: dict[str, JobRecord] = {}
        for part in chunks(job_ids, 500):
            found |= {record.id: record for record in self._client.statuses(part) if record is not None}
        return found

    def _samples(
        self, row_id: str, draw: Draws, records: dict[str, JobRecord]
    ) -> tuple[tuple[Made, ...], list[Sample]] | None:
        """The samples of a row; None when something of it is gone."""
        mades, samples = [], []
        try:
            for job_id, wanted in draw.items():
                made = self._outputs.result(records[job_id])
                mades.append(made)
                for index, files in groupby(made.manifest.outputs, lambda output: output.index):
                    if wanted is None or index in wanted:
                        samples.append((made, tuple(files), records[job_id]))
            keyed = [(key, *one) for key, one in zip(sample_keys(row_id, len(samples)), samples, strict=True)]
            return tuple(mades), [self._sample(*one) for one in keyed]
        except (KeyError, NotFound, Conflict):
            return None

    def _sample(self, key: str, made: Made, outputs: Sequence[ManifestOutput], record: JobRecord) -> Sample:
        """Of one output: its file, or its frames or layers, the first of which the metadata describes."""
        files = {_extension(one): _read(made, one) for one in outputs}
        output = outputs[0]
        side = _sidecar(made, output.sidecar) if output.sidecar else {}
        job = record.job
        parameters: dict[str, JsonValue] = {
            name: list(value) if isinstance(value, list) else value for name, value in job.params.items()
        }
        metadata: dict[str, JsonValue] = {
            "seed": output.seed,
            **output.model_dump(include=set(FACTS)),
            "sha256": output.sha256,
            "model": job.model,
            "revision": side.get("model", {}).get("revision", ""),
            "numerics": made.manifest.numerics or "",
            "parameters": parameters,
            "job": record.id,
            "task": job.task,
            "bytes": sum(one.size for one in outputs),
            "versions": side.get("versions", {}),
            "request": side.get("request", {}),  # enough to make it again: saggar verify --regenerate
        }
        if "unread" in side:
            metadata["unread"] = side["unread"]
        if job.negative_prompt is not None:
            metadata["negative_prompt"] = job.negative_prompt
        if job.tags:
            metadata["tags"] = list(job.tags)
        return Sample(key, files, job.prompt, metadata)

    def _mark(self) -> None:
        """Rows whose shard is there are packed; their single objects may go."""
        assert self._writer is not None
        shards = len(self._writer.shards)
        if shards == self._shards and len(self._waiting) < _CHUNK * 8:
            return
        packed = {
            n: row for n, row in self._waiting.items() if all(key in self._writer.packed for key in row.keys)
        }
        self._controller.runs.pack(self._spec.name, self._controller.token, list(packed))
        for n, row in packed.items():
            if n >= SHOWN:
                self._controller.let_go(row.job_ids)
                for made in row.made:
                    if made.key.startswith(f"{self._spec.prefix}/"):  # nothing but what is ours to remove
                        remove(made)
            del self._waiting[n]
        self._shards = shards  # now that all is done: Redis or a store may have been away


def _sidecar(made: Made, file: ManifestFile) -> dict[str, dict[str, JsonValue]]:
    """Raises as `_read`."""
    return cast("dict[str, dict[str, JsonValue]]", json.loads(_read(made, file)))


def _read(made: Made, file: ManifestFile) -> bytes:
    """Raises NotFound; Conflict for other bytes than the manifest says."""
    data = made.storage.get(file.key)
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise Conflict(f"{file.key} holds other bytes than its manifest says")
    return data


def _extension(output: ManifestOutput) -> str:
    """`png`, or `0003.png` for a part."""
    plain = _EXTENSIONS.get(output.content_type, output.key.rpartition(".")[2])
    return plain if output.part is None else f"{output.part:04d}.{plain}"


def sample_key(row_id: str, number: int | None = None) -> str:
    """A row's key in shards; `number`: of one of several pictures."""
    key = row_id.replace(".", "_")
    return key if number is None else f"{key}_{number}"


def packed_keys(target: Storage, name: str) -> set[str]:
    """The keys of all samples in a run's shards, by their indexes. Raises Conflict when one cannot be read."""
    keys = ShardKeys(name)
    return {row for number in index_numbers(target, keys) for row in read_index(target, keys, number).rows}


def sample_keys(row_id: str, pictures: int) -> list[str]:
    """The keys of all of a row's pictures."""
    if pictures == 1:
        return [sample_key(row_id)]
    return [sample_key(row_id, number) for number in range(pictures)]


def is_packed(row_id: str, pictures: int, packed: Set[str]) -> bool:
    """Whether all of a row's pictures stand among these keys."""
    return all(key in packed for key in sample_keys(row_id, pictures))
