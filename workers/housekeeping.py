"""What must be looked after while jobs flow: lost messages, deadlines, old records, objects nobody wants.

Every worker runs it; the reconciler's lock lets one of them work at a time.
"""

from __future__ import annotations

import logging
import threading

import redis
from saggar.jobs.cards import Cards
from saggar.jobs.errors import InvalidJob
from saggar.jobs.ledger import Ledger, reconcile
from saggar.jobs.settings import JobSettings
from saggar.storage.base import Storage
from saggar.storage.errors import StorageError
from saggar.storage.sweep import sweep

log = logging.getLogger(__name__)
EVERY_S = 5.0
_SWEEP_EVERY_S = 12 * 3600
_SWEEP_TRY_S = 3600
"""The turn of one that began a sweep: when it has failed by then, or died, another one tries."""


class Housekeeper:
    """A thread that looks after the ledger every five seconds and after the store twice a day. `close` ends it."""

    def __init__(
        self,
        client: redis.Redis,
        settings: JobSettings,
        storage: Storage | None = None,
        every_s: float = EVERY_S,
    ) -> None:
        self._client = client
        self._settings = settings
        self._ledger = Ledger(client, settings)
        self._cards = Cards(client, settings)
        self._storage = storage
        self._every_s = every_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._live, name="saggar-housekeeping", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def look_after(self) -> None:
        """One round. Raises redis.RedisError and StorageError."""
        done = reconcile(self._ledger, self._settings, self._cards.get)
        if done is not None and (done.replaced or done.buried):
            log.warning("%d lost messages put again, %d jobs buried", done.replaced, done.buried)
        if self._storage is not None and self._my_turn_to_sweep(self._storage):
            self._sweep(self._storage)

    def _live(self) -> None:
        while not self._closed.wait(self._every_s):
            try:
                self.look_after()
            except (redis.RedisError, StorageError) as error:
                log.warning("housekeeping waits for the next round: %s", error)
            except Exception:  # one record that cannot be read must not end what looks after all others
                log.exception("housekeeping failed, next round in %.0f s", self._every_s)

    def _my_turn_to_sweep(self, storage: Storage) -> bool:
        return bool(self._client.set(self._turn(storage), "1", nx=True, ex=_SWEEP_TRY_S))

    def _sweep(self, storage: Storage) -> None:
        report = sweep(storage, ended_without_result=self._ended_without_result)
        self._client.set(self._turn(storage), "1", ex=_SWEEP_EVERY_S)
        log.info("swept %s: %s", storage.url, report)

    def _turn(self, storage: Storage) -> str:
        return f"{self._settings.key_prefix}swept:{storage.url}"

    def _ended_without_result(self, job_id: str) -> bool:
        try:
            record = self._ledger.get(job_id)
        except InvalidJob:  # a folder that is no job's, or a record of a newer version: not ours to sweep
            return False
        return record is not None and record.ended and record.state != "succeeded"
