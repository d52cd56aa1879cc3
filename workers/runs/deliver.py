"""Where a run's single objects are: where the run's target is, or brought there.

Workers write into their own store. Where that is the target nothing is copied; elsewhere each result is fetched, its
hashes checked, and written under the same keys, `result.json` last.
"""

from __future__ import annotations

import hashlib

from saggar.jobs.record import JobRecord
from saggar.storage.base import Storage
from saggar.storage.errors import Conflict, NotFound
from saggar.storage.keys import result_key
from saggar.workers.runs.outputs import Made, Outputs


def deliver(record: JobRecord, target: Storage, outputs: Outputs) -> str | None:
    """Copies a result into the target unless it is there; why that cannot be, or None: it is gone, or other than it
    was, and nothing of it stays in the target.

    Raises StorageUnavailable and StorageRefused: a store cannot answer now, or does not want to.
    """
    if is_in(record, target):
        return None
    try:
        _copy(outputs.result(record), target)
    except (NotFound, Conflict) as error:
        return f"its result cannot be fetched: {error}"
    return None


def is_in(record: JobRecord, target: Storage) -> bool:
    """Whether the worker's store is the target."""
    key = result_key(record.job.output.prefix, record.id)
    return record.result is not None and record.result.manifest == target.uri(key)


def _copy(made: Made, target: Storage) -> None:
    """Raises NotFound and Conflict for a result that is not whole."""
    try:
        for file in made.manifest.files():
            data = made.storage.get(file.key)
            if hashlib.sha256(data).hexdigest() != file.sha256:
                raise Conflict(f"{file.key} holds other bytes than its manifest says")
            target.put(file.key, data, content_type=file.content_type)
    except (NotFound, Conflict):
        if target.head(made.key) is None:
            target.delete([file.key for file in made.manifest.files()])
        raise
    target.put(made.key, made.manifest.to_bytes(), content_type="application/json")
