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
from saggar.storage.errors import StorageError, StorageRefused, StorageUnavailable
from saggar.storage.retry import Backoff, retrying
from saggar.storage.seldom import Seldom

log = logging.getLogger(__name__)
Result = TypeVar("Result")
_TRIALS = 3


class Patience:
    """One for a store and a process, whose threads share it: an outage is told once, with its reason, and its end."""

    def __init__(self, storage: Storage, backoff: Backoff | None = None) -> None:
        self._storage = storage
        self._backoff = backoff or Backoff()
        self._lock = threading.Lock()
        self._began: float | None = None
        self._tells_end = False
        self._away, self._left = Seldom(), Seldom()

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
                if self._refuses_all():
                    refused_alone = 0
                    self._is_away(error)
                elif (refused_alone := refused_alone + 1) == _TRIALS:
                    raise
                raise StorageUnavailable(str(error)) from error
            self._is_back()
            return result

        return retrying(once, lambda _: keep_going(), backoff=self._backoff, stop=stop)

    def _refuses_all(self) -> bool:
        """Whether any object would be refused, as far as can be told now."""
        key = f"_probe/{uuid.uuid4().hex}"
        once = f"{key}-once"
        try:
            self._storage.put(key, b"trial", content_type="text/plain")
            if self._storage.conditional_put:
                self._storage.put_if_absent(once, b"trial", content_type="text/plain")
        except (StorageRefused, StorageUnavailable):
            return True
        finally:  # whatever was refused: the other may be there, and so may one whose answer was lost
            self._forget([key, once])
        return False

    def _forget(self, keys: list[str]) -> None:
        try:
            self._storage.delete(keys)
        except StorageError as error:
            if self._left.due():
                log.info("trial objects may stay in the store: %s", error)

    def _is_away(self, error: StorageError) -> None:
        with self._lock:
            self._began = self._began or time.monotonic()
            tell = self._away.due()
            self._tells_end = self._tells_end or tell
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
