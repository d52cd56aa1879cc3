"""Removing what no result names: objects of attempts that did not win, and uploads that nobody finished.

Streams over the store's listing, one job at a time. Whether a job without a result may still get one is not
known here: the caller says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby

from saggar.storage.base import ObjectInfo, Storage
from saggar.storage.errors import NotFound
from saggar.storage.keys import RESULT_NAME, parse_attempt
from saggar.storage.results import read_result

DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What one sweep removed; `freed_bytes` counts objects only."""

    objects: int
    freed_bytes: int
    uploads: int


def sweep(
    storage: Storage,
    *,
    is_open: Callable[[str], bool],
    prefix: str = "",
    older_than: timedelta = DAY,
    now: datetime | None = None,
) -> SweepReport:
    """Delete attempts' objects older than `older_than` that no manifest names and no open job may still want.

    `is_open(job id)` is asked only for jobs without a manifest. Raises Conflict on a manifest that cannot
    be read: better keep everything than guess.
    """
    before = (now or datetime.now(UTC)) - older_than
    objects = freed = 0
    for job, group in groupby(_attempt_objects(storage, prefix), key=lambda pair: pair[0]):
        old = [info for _, info in group if info.modified < before]
        doomed = _losers(storage, job, old, is_open) if old else []
        storage.delete(info.key for info in doomed)
        objects += len(doomed)
        freed += sum(info.size for info in doomed)
    return SweepReport(objects, freed, storage.abandon_uploads(before))


def _attempt_objects(storage: Storage, prefix: str) -> Iterator[tuple[str, ObjectInfo]]:
    """(the job's own prefix, object); a listing keeps a job's attempts together."""
    for info in storage.list(prefix):
        attempt = parse_attempt(info.key)
        if attempt is not None:
            yield attempt.job_prefix, info


def _losers(
    storage: Storage, job: str, old: list[ObjectInfo], is_open: Callable[[str], bool]
) -> list[ObjectInfo]:
    try:
        manifest = read_result(storage, f"{job}/{RESULT_NAME}")
    except NotFound:
        return [] if is_open(job.rpartition("/")[2]) else old
    named = {file.key for file in manifest.files()}
    return [info for info in old if info.key not in named]
