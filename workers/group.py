"""Small outputs for a folder of this disk, published many at a time: one flush and one round trip for all of them.

The order is that of a single job (service.py): all objects of the group, then all manifests, then all records. What
does not go through is left to the job's own way, from the last step that is known to have been made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import redis
from saggar.engine.media import Clip, Sound
from saggar.engine.request import Output
from saggar.jobs.ledger import Ending, Ledger
from saggar.jobs.record import JobResult
from saggar.jobs.schema import Job
from saggar.storage.errors import StorageError
from saggar.storage.group import Item
from saggar.storage.spool import SpoolItem
from saggar.workers.attempts import Attempt, Attempts
from saggar.workers.publish import Publisher, Upload
from saggar.workers.service import Service

log = logging.getLogger(__name__)
SMALL_BYTES = 1 << 20
"""Pixels of an output that goes with others. What takes long to encode must hold nobody up."""
_JSON = "application/json"
Rest = Callable[[], JobResult]


@runtime_checkable
class GroupStorage(Protocol):
    """A store that makes many objects durable together."""

    def put_group(self, items: Sequence[Item]) -> Sequence[StorageError | None]: ...

    def put_group_if_absent(self, items: Sequence[Item]) -> Sequence[bool | StorageError]: ...


@dataclass(eq=False, slots=True)
class Made:
    """An output and whose it is. `rest`: what is left to do for its attempt, at every moment; `ended`: nothing but to
    say so."""

    job: Job
    attempt: Attempt
    output: Output
    rest: Rest
    upload: Upload | None = None
    result: JobResult | None = None
    ended: bool = False


class GroupPublisher:
    """`publish` from any thread."""

    def __init__(self, ledger: Ledger, attempts: Attempts, publisher: Publisher, service: Service) -> None:
        self._ledger = ledger
        self._attempts = attempts
        self._publisher = publisher
        self._service = service
        storage: object = publisher.storage
        self._storage = storage if isinstance(storage, GroupStorage) and not publisher.spools else None

    def takes(self, output: Output) -> bool:
        """Whether an output is one of those that go together."""
        if self._storage is None:
            return False
        arrays = [one for one in output.media if not isinstance(one, Clip | Sound)]
        return len(arrays) == len(output.media) and sum(one.nbytes for one in arrays) <= SMALL_BYTES

    def publish(self, group: Sequence[Made]) -> None:
        """Takes each as far as it simply goes: its `rest` then says what is left, or gives the result. Raises nothing
        that would be the fault of one job."""
        assert self._storage is not None
        for made in group:
            self._attempts.uploading(made.attempt)
        try:
            stored = self._put(self._storage, group)
            sealed = self._seal(self._storage, [made for made in stored if made.attempt.wanted])
        except StorageError as error:
            log.info("a group of %d outputs falls apart: %s", len(group), error)
        else:
            self._commit(sealed)

    def _put(self, storage: GroupStorage, group: Sequence[Made]) -> list[Made]:
        """Those whose objects are in the store."""
        items: dict[Made, list[SpoolItem]] = {}
        for made in group:
            try:
                items[made], manifest, key = self._publisher.make(made.job, made.attempt.number, made.output)
            except Exception as error:  # noqa: BLE001  (its own way meets it again, and says so)
                log.info("%s leaves its group: %s", made.job.id, type(error).__name__)
            else:
                made.upload = Upload(manifest, key, None)
        flat = [item for some in items.values() for item in some]
        failed = {
            item.key for item, error in zip(flat, storage.put_group(flat), strict=True) if error is not None
        }
        stored = [made for made, some in items.items() if not any(item.key in failed for item in some)]
        for made in stored:
            made.rest = self._seal_alone(made)
        return stored

    def _seal(self, storage: GroupStorage, group: Sequence[Made]) -> list[Made]:
        """Those whose manifest was the first, which makes it the result."""
        uploads = [made.upload for made in group if made.upload is not None]
        answers = storage.put_group_if_absent(
            [SpoolItem(upload.key, upload.manifest.to_bytes(), _JSON) for upload in uploads]
        )
        sealed = []
        for made, upload, answer in zip(group, uploads, answers, strict=True):
            if answer is True:
                made.result = self._publisher.result(upload.manifest, upload.key)
                made.rest = self._commit_alone(made.attempt, made.result)
                sealed.append(made)
        return sealed

    def _commit(self, group: Sequence[Made]) -> None:
        ops = self._ledger.ops
        commits = [
            ops.commit(made.attempt.job_id, made.attempt.number, made.result)
            for made in group
            if made.result is not None
        ]
        if not commits:
            return
        try:
            answers = self._ledger.runner.run_many(commits)
        except redis.RedisError as error:
            log.info("%d records wait for Redis: %s", len(commits), error)
            return
        for made, answer in zip(group, answers, strict=True):
            if isinstance(answer, Ending) and answer.won and made.result is not None:
                made.rest, made.ended = _given(made.result), True

    def _seal_alone(self, made: Made) -> Rest:
        upload = made.upload
        assert upload is not None
        return lambda: self._service.seal(made.attempt, upload)

    def _commit_alone(self, attempt: Attempt, result: JobResult) -> Rest:
        return lambda: self._service.commit(attempt, result)


def _given(result: JobResult) -> Rest:
    return lambda: result
