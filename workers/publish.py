"""From media to objects in the store: encode → spool → upload → manifest.

A `Publisher` belongs to one worker; its threads share it. It knows the store and the spool, not the ledger: whether
an attempt may still publish is asked through `wanted`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from itertools import chain
from threading import Event

from pydantic import JsonValue
from saggar.engine.request import Output
from saggar.jobs.record import JobResult, OutputRef, UnreadText
from saggar.jobs.schema import Job
from saggar.storage import keys
from saggar.storage.base import Storage
from saggar.storage.errors import Conflict, SpoolFull, StorageUnavailable
from saggar.storage.patience import Patience
from saggar.storage.results import (
    ManifestFile,
    ManifestOutput,
    ManifestUnread,
    ResultManifest,
    commit_result,
    read_result,
    spec_digest,
    verify_result,
)
from saggar.storage.spool import Spool, SpoolEntry, SpoolItem
from saggar.storage.upload import upload_entry
from saggar.workers.encode import FACTS, Encoded
from saggar.workers.encode_media import encode_media
from saggar.workers.sidecar import sidecar, sidecar_bytes

log = logging.getLogger(__name__)

_JSON = "application/json"
_ROOM_KEPT = 0.05  # of the spool, for what the engine still has in hand when it is told to pause
_LOOK_S = 1.0
_SHARED = {"part", *FACTS}
Wanted = Callable[[], bool]
"""Whether this attempt's result is still wanted: its lease is ours and nobody cancelled it."""


@dataclass(frozen=True)
class Origin:
    """What every output of this worker has in common and its sidecar says: the model and the versions."""

    model: str
    revision: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Upload:
    """An attempt whose objects are in the store and whose manifest is not written yet."""

    manifest: ResultManifest
    key: str
    entry: SpoolEntry | None


class Publisher:
    """`spool` None: the store is a folder of this disk, and writing twice would make nothing safer."""

    def __init__(self, storage: Storage, spool: Spool | None, origin: Origin) -> None:
        self.storage = storage
        self.patience = Patience(storage)
        self.spools = spool is not None
        self._spool = spool
        self._had_room = True
        self._origin = origin

    def upload(
        self, job: Job, attempt: int, output: Output, wanted: Wanted, stop: Event | None = None
    ) -> Upload:
        """Encodes an output and puts its objects, for as long as it is wanted; `stop` ends a wait for the store.

        Raises StorageUnavailable when it is no longer wanted and StorageRefused when the store refuses these objects
        and would take others.
        """
        items, manifest, key = self.make(job, attempt, output)
        if self._spool is None:
            for item in items:
                put = partial(self.storage.put, item.key, item.data, content_type=item.content_type)
                self.patience.call(put, wanted, stop)
            return Upload(manifest, key, None)
        entry = self._write(self._spool, job.id, attempt, items, wanted)
        try:
            upload_entry(self.storage, entry, keep_going=wanted, patience=self.patience, stop=stop)
        except BaseException:
            self._spool.remove(entry)
            raise
        return Upload(manifest, key, entry)

    def make(self, job: Job, attempt: int, output: Output) -> tuple[list[SpoolItem], ResultManifest, str]:
        """Encodes an output: its objects, its manifest, and the manifest's key."""
        began = time.perf_counter()
        items, outputs = self._encode(job, attempt, output)
        manifest = ResultManifest(
            job_id=job.id,
            attempt=attempt,
            spec_sha256=_digest(job),
            model=job.model,
            created=datetime.now(UTC),
            outputs=outputs,
            batch_id=output.batch_id,
            batch_size=output.batch_size,
            numerics=output.numerics,
            timings={**output.timings, "encode_output": time.perf_counter() - began},
            unread=tuple(ManifestUnread(field=field, **cut._asdict()) for field, cut in output.unread.items())
            or None,
        )
        return items, manifest, keys.result_key(job.output.prefix, job.id)

    def has_room(self) -> bool:
        """Whether outputs can be taken: False pauses the engine, since a store that is away has filled the spool."""
        if self._spool is None:
            return True
        room = self._spool.room() > self._spool.limit_bytes * _ROOM_KEPT
        if room != self._had_room:
            self._had_room = room
            log.warning(
                "the spool %s", "has room again" if room else "is full: no job is fetched until uploads go on"
            )
        return room

    def commit(self, upload: Upload) -> JobResult:
        """Writes the manifest, or accepts the one that another attempt wrote first; what stands is the result."""
        outcome = commit_result(self.storage, upload.key, upload.manifest)
        return self.result(outcome.manifest, upload.key)

    def find(self, job: Job) -> JobResult | None:
        """The result of an earlier attempt that ended after its manifest and before its record, if there is one."""
        key = keys.result_key(job.output.prefix, job.id)
        if self.storage.head(key) is None:
            return None
        manifest = read_result(self.storage, key)
        if manifest.spec_sha256 != _digest(job):
            raise Conflict(f"{key} is the result of another request")
        verify_result(self.storage, manifest)
        return self.result(manifest, key)

    def forget(self, upload: Upload) -> None:
        """The attempt is over, one way or the other: its spooled bytes are not needed any more."""
        if self._spool is not None and upload.entry is not None:
            self._spool.remove(upload.entry)

    def result(self, manifest: ResultManifest, key: str) -> JobResult:
        """The record that the ledger keeps of a manifest."""
        return JobResult(
            outputs=[
                OutputRef(
                    index=output.index,
                    uri=self.storage.uri(output.key),
                    sha256=output.sha256,
                    bytes=output.size,
                    content_type=output.content_type,
                    seed=output.seed or 0,
                    **output.model_dump(include=_SHARED),
                )
                for output in manifest.outputs
            ],
            manifest=self.storage.uri(key),
            attempt=manifest.attempt,
            batch_id=manifest.batch_id or "",
            batch_size=manifest.batch_size or 1,
            timings=manifest.timings,
            unread=tuple(UnreadText(**one.model_dump()) for one in manifest.unread)
            if manifest.unread
            else None,
        )

    @staticmethod
    def _write(spool: Spool, job_id: str, attempt: int, items: list[SpoolItem], wanted: Wanted) -> SpoolEntry:
        """Into the spool, once it has room. Raises StorageUnavailable when nobody wants it any more."""
        while True:
            try:
                return spool.write(job_id, attempt, items)
            except SpoolFull as full:
                if not wanted():
                    raise StorageUnavailable(f"{job_id}: the spool stayed full") from full
                spool.wait_for_room(full.needed, _LOOK_S)  # if in vain, the next write says so

    def _encode(
        self, job: Job, attempt: int, output: Output
    ) -> tuple[list[SpoolItem], tuple[ManifestOutput, ...]]:
        items: list[SpoolItem] = []
        outputs: list[ManifestOutput] = []
        each = len(output.media) // job.num_outputs  # more than one for a model of layers
        for index in range(job.num_outputs):
            media = range(index * each, (index + 1) * each)
            files = (file for i in media for file in self._files(job, output, i))
            for new, described in self._describe(job, attempt, output, index, output.seeds[media[0]], files):
                items += new
                outputs.append(described)
        return items, tuple(outputs)

    @staticmethod
    def _files(job: Job, output: Output, number: int) -> Iterator[Encoded]:
        wish = job.output
        parameters = _parameters(job, output.seeds[number])
        return encode_media(output.media[number], wish.format, wish.quality, parameters)

    def _describe(
        self, job: Job, attempt: int, output: Output, index: int, seed: int, files: Iterator[Encoded]
    ) -> Iterator[tuple[list[SpoolItem], ManifestOutput]]:
        """For each file of an output its object, with the first one's sidecar, and the manifest's line about it."""
        first, second = next(files), next(files, None)
        several = () if second is None else (second,)
        for number, encoded in enumerate(chain((first,), several, files)):
            part = None if second is None else number
            place = (job.output.prefix, job.id, attempt, index, encoded.sha256)
            item = SpoolItem(
                keys.output_key(*place, encoded.extension, part), encoded.data, encoded.content_type
            )
            facts = encoded.facts
            side = None if number else self._sidecar(job, attempt, output, index, seed, encoded, part)
            described = ManifestOutput(
                key=item.key,
                sha256=encoded.sha256,
                size=len(encoded.data),
                content_type=encoded.content_type,
                index=index,
                seed=seed,
                sidecar=_described(side) if side else None,
                part=part,
                width=facts.width,
                height=facts.height,
                frames=facts.frames,
                fps=facts.fps,
                duration_s=facts.duration_s,
                sample_rate=facts.sample_rate,
                channels=facts.channels,
            )
            yield [item, side] if side else [item], described

    def _sidecar(
        self,
        job: Job,
        attempt: int,
        output: Output,
        index: int,
        seed: int,
        encoded: Encoded,
        part: int | None,
    ) -> SpoolItem:
        content = sidecar(
            job_id=job.id,
            attempt=attempt,
            index=index,
            seed=seed,
            request=job.model_dump(mode="json", exclude={"id"}),
            model=self._origin.model,
            revision=self._origin.revision,
            versions=self._origin.versions,
            numerics=output.numerics,
            batch_id=output.batch_id,
            batch_size=output.batch_size,
            steps=output.steps,
            timings=output.timings,
            encoded=encoded,
            unread=output.unread,
        )
        key = keys.sidecar_key(job.output.prefix, job.id, attempt, index, encoded.sha256, part)
        return SpoolItem(key, sidecar_bytes(content), _JSON)


def _described(side: SpoolItem) -> ManifestFile:
    return ManifestFile(
        key=side.key,
        sha256=sha256(side.data).hexdigest(),
        size=len(side.data),
        content_type=side.content_type,
    )


def _digest(job: Job) -> str:
    """Of a checked job: equal for every attempt, since the ledger keeps the seed that submit chose."""
    return spec_digest(job.model_dump(mode="json", exclude={"id"}))


def _parameters(job: Job, seed: int) -> dict[str, JsonValue]:
    """What a file carries inside: enough to ask for it again."""
    parameters: dict[str, JsonValue] = {"prompt": job.prompt, "model": job.model, "seed": seed}
    if job.negative_prompt is not None:
        parameters["negative_prompt"] = job.negative_prompt
    parameters |= {
        name: list(value) if isinstance(value, list) else value for name, value in job.params.items()
    }
    return parameters
