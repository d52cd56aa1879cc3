"""What becomes of a run's results: they are where the run's target is, or are brought there.

Workers write into their own store. Where that is the target nothing is copied; elsewhere each result is fetched, its
hashes checked, and written under the same keys, `result.json` last.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from saggar.jobs.client import JobClient
from saggar.jobs.record import JobRecord
from saggar.jobs.runs import Ended, Run, Verdict
from saggar.jobs.runs.controller import bytes_of
from saggar.storage.base import Storage
from saggar.storage.errors import Conflict, NotFound
from saggar.storage.keys import result_key
from saggar.workers.runs.folder import RunFolder
from saggar.workers.runs.outputs import Made, Outputs
from saggar.workers.runs.sheet import SheetFailed, make_sheet

log = logging.getLogger(__name__)
SHEET = "contact-sheet.png"
_THREADS = 8


class Delivery:
    """The finisher of a run whose output is single objects. Close it."""

    def __init__(self, client: JobClient, target: Storage, folder: RunFolder) -> None:
        self.target = target
        self.folder = folder
        self.outputs = Outputs()
        self._client = client
        self._pool = ThreadPoolExecutor(_THREADS, "saggar-deliver")

    def judge(self, ended: Sequence[Ended]) -> Sequence[Verdict]:
        """As Finisher.judge. Raises StorageUnavailable and StorageRefused: the target cannot take it now."""
        return list(self._pool.map(self._deliver, ended))

    def tend(self, run: Run) -> None:
        """Single objects need no tending."""

    def complete(self, run: Run) -> None:
        """The contact sheet, then `_SUCCESS`. A sheet that cannot be made is no reason to call the run a failure."""
        if run.spec.sheet and run.done:
            self._write_sheet(run)
        counts = {
            name: getattr(run, name)
            for name in ("planned", "done", "failed", "rejected", "cancelled", "redrawn")
        }
        self.folder.succeed(
            json.dumps({"run": run.name, "manifest": run.digest, **counts}, indent=2).encode()
        )

    def close(self) -> None:
        self._pool.shutdown()
        self.outputs.close()

    def _deliver(self, one: Ended) -> Verdict:
        if self._is_there(one.record):
            return Verdict("done", bytes=bytes_of(one.record))
        try:
            self._copy(self.outputs.result(one.record))
        except (NotFound, Conflict) as error:
            return Verdict("failed", why=f"its result cannot be fetched: {error}")
        return Verdict("done", bytes=bytes_of(one.record))

    def _is_there(self, record: JobRecord) -> bool:
        """Whether the worker's store is the target."""
        assert record.result is not None
        return record.result.manifest == self.target.uri(result_key(record.job.output.prefix, record.id))

    def _copy(self, made: Made) -> None:
        """Raises NotFound and Conflict for a result that is not whole."""
        for file in made.manifest.files():
            data = made.storage.get(file.key)
            if hashlib.sha256(data).hexdigest() != file.sha256:
                raise Conflict(f"{file.key} holds other bytes than its manifest says")
            self.target.put(file.key, data, content_type=file.content_type)
        self.target.put(made.key, made.manifest.to_bytes(), content_type="application/json")

    def _write_sheet(self, run: Run) -> None:
        try:
            self.target.put(SHEET, make_sheet(self._client, run.name), content_type="image/png")
        except SheetFailed as error:
            log.warning("run %s: no contact sheet: %s", run.name, error)
