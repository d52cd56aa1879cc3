"""Removing what no result names: objects of attempts that did not win, and uploads that nobody finished.

Streams over the store's listing, one job at a time. Whether a job without a manifest has ended without a
result is not known here: the caller says so. Whatever cannot be judged stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby

from saggar.storage.base import ObjectInfo, Storage
from saggar.storage.errors import Conflict, NotFound, StorageRefused
from saggar.storage.keys import RESULT_NAME, parse_attempt
from saggar.storage.results import read_result

log = logging.getLogger(__name__)
DAY = timedelta(days=1)
Ended = Callable[[str], bool]
"""Of a job's id: True only when the job is known to have ended, and without a result."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What one sweep removed; `freed_bytes` counts objects only, `skipped` jobs whose manifest could not be read
    or whose objects could not be removed.
    """

    objects: int
    freed_bytes: int
    uploads: int
    skipped: int = 0


def sweep(
    storage: Storage,
    *,
    ended_without_result: Ended,
    prefix: str = "",
    older_than: timedelta = DAY,
    now: datetime | None = None,
) -> SweepReport:
    """Delete attempts' objects older than `older_than` that the job's manifest does not name, and uploads as old.

    `ended_without_result` is asked only for jobs without a manifest. Where it says no, everything stays: the job
    may be open, known to another queue alone, or a success whose manifest a crash kept from being written (on
    stores without conditional PUT the record comes first). Raises StorageUnavailable, and whatever it raises.
    """
    before = (now or datetime.now(UTC)) - older_than
    objects = freed = skipped = 0
    for job, group in groupby(_attempt_objects(storage, prefix), key=lambda pair: pair[0]):
        old = [info for _, info in group if info.modified < before]
        try:
            doomed = _losers(storage, job, old, ended_without_result) if old else []
            storage.delete(info.key for info in doomed)
        except (Conflict, StorageRefused) as error:
            log.warning("%s is not swept: %s", job, error)
            skipped += 1
            continue
        objects += len(doomed)
        freed += sum(info.size for info in doomed)
    return SweepReport(objects, freed, storage.abandon_uploads(before), skipped)


def _attempt_objects(storage: Storage, prefix: str) -> Iterator[tuple[str, ObjectInfo]]:
    """(the job's own prefix, object); a listing keeps a job's attempts together."""
    for info in storage.list(prefix):
        attempt = parse_attempt(info.key)
        if attempt is not None:
            yield attempt.job_prefix, info


def _losers(storage: Storage, job: str, old: list[ObjectInfo], ended: Ended) -> list[ObjectInfo]:
    try:
        manifest = read_result(storage, f"{job}/{RESULT_NAME}")
    except NotFound:
        return old if ended(job.rpartition("/")[2]) else []
    named = {file.key for file in manifest.files()}
    return [info for info in old if info.key not in named]
