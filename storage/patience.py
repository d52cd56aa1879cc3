"""Calling a store until it does what was asked, for as long as somebody wants it: an outage delays, it fails nothing.

A store that refuses everybody is an outage too. Whether a token has expired, a clock is wrong or a bucket is gone:
no object is at fault, and each further one would be refused as well. So a refusal is believed to be an object's own
only when the store takes a trial object right after it, three times in a row: permissions that change reach a store's
servers one after the other.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from threading import Event
from typing import TypeVar

from saggar.storage.base import Storage
from saggar.storage.errors import StorageDenied, StorageError, StorageRefused, StorageUnavailable
from saggar.storage.retry import Backoff, retrying

log = logging.getLogger(__name__)
Result = TypeVar("Result")
_TOLD_EVERY_S = 60.0
_TRIALS = 3


class Patience:
    """One for a store and a process, whose threads share it: an outage is told once, with its reason, and its end."""

    def __init__(self, storage: Storage, backoff: Backoff | None = None) -> None:
        self._storage = storage
        self._backoff = backoff or Backoff()
        self._lock = threading.Lock()
        self._began: float | None = None
        self._told: float | None = None
        self._tells_end = False

    def call(
        self, call: Callable[[], Result], keep_going: Callable[[], bool], stop: Event | None = None
    ) -> Result:
        """Asked again after each failure, for as long as `keep_going` says so; `stop` ends a wait at once.

        Raises the last StorageUnavailable when told to stop, and StorageRefused for what is refused by itself.
        """
        refused_alone = 0

        def once() -> Result:
            nonlocal refused_alone
            try:
                result = call()
            except StorageUnavailable as error:
                self._is_away(error)
                raise
            except StorageRefused as error:
                if self._refuses_all(error):
                    refused_alone = 0
                    self._is_away(error)
                elif (refused_alone := refused_alone + 1) == _TRIALS:
                    raise
                raise StorageUnavailable(str(error)) from error
            self._is_back()
            return result

        return retrying(once, lambda _: keep_going(), backoff=self._backoff, stop=stop)

    def _refuses_all(self, error: StorageRefused) -> bool:
        """Whether any object would have been refused, as far as can be told now."""
        if isinstance(error, StorageDenied):
            return True
        key = f"_probe/{uuid.uuid4().hex}"
        try:
            self._storage.put(key, b"trial", content_type="text/plain")
            if self._storage.conditional_put:
                self._storage.put_if_absent(f"{key}-once", b"trial", content_type="text/plain")
        except (StorageRefused, StorageUnavailable):
            return True
        try:
            self._storage.delete([key, f"{key}-once"])
        except StorageError as left:
            log.info("a trial object stays in the store: %s", left)
        return False

    def _is_away(self, error: StorageError) -> None:
        with self._lock:
            now = time.monotonic()
            self._began = self._began or now
            tell = self._told is None or now - self._told >= _TOLD_EVERY_S
            if tell:
                self._told, self._tells_end = now, True
        if tell:
            log.warning("%s takes nothing now; trying on, nothing is lost: %s", self._storage.url, error)

    def _is_back(self) -> None:
        if self._began is None:  # the usual case needs no lock
            return
        with self._lock:
            began, self._began = self._began, None
            tell, self._tells_end = self._tells_end, False
        if tell and began is not None:
            log.warning("%s answers again, after %.0f s", self._storage.url, time.monotonic() - began)
