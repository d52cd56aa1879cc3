"""One input file, from wherever the policy lets it come from, into a temporary file."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable
from typing import IO

from saggar.storage.base import Storage, open_storage
from saggar.storage.errors import (
    InvalidKey,
    NotFound,
    StorageConfigError,
    StorageDenied,
    StorageRefused,
    StorageUnavailable,
)
from saggar.storage.retry import Backoff, retrying
from saggar.storage.seldom import Seldom
from saggar.workers.inputs.addresses import Resolve, resolve
from saggar.workers.inputs.bad import BadInput
from saggar.workers.inputs.folders import copy_file
from saggar.workers.inputs.policy import Limits, Place, Policy
from saggar.workers.inputs.web import Cut, Web, too_large

log = logging.getLogger(__name__)
OpenStore = Callable[[str], Storage]


class Ticket:
    """A job's fetches, to be ended from another thread. `over` is set then."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self._lock = threading.Lock()
        self._cut: Cut | None = None

    def cancel(self) -> bool:
        """Ends the fetch under way and every later one."""
        with self._lock:
            self.over.set()
            if self._cut is not None:
                self._cut.cancel()
        return True

    def cut(self) -> Cut:
        """For the next fetch."""
        with self._lock:
            self._cut = Cut()
            if self.over.is_set():
                self._cut.cancel()
            return self._cut


class Fetcher:
    """Threads share it. Close it: it keeps the stores that it has opened, one for each bucket that is allowed."""

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        open_store: OpenStore = open_storage,
        resolver: Resolve = resolve,
    ) -> None:
        self.policy, self.limits = policy, limits
        self._web = Web(policy, limits, resolver)
        self._open_store = open_store
        self._stores: dict[str, Storage] = {}
        self._lock = threading.Lock()
        self._waiting = Seldom()

    def fetch(self, uri: str, ticket: Ticket) -> IO[bytes]:
        """The file, at its beginning; close it.

        Raises BadInput, WebUnavailable, and StorageUnavailable once the ticket is over while S3 is away.
        """
        place, source = self.policy.find(uri)
        file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by the caller)
        try:
            if place.scheme == "file":
                copy_file(place, source, file, self.limits.bytes)
            elif place.scheme == "https":
                self._web.fetch(place, file, ticket.cut())
            else:
                self._from_store(place, file, ticket)
            if file.tell() == 0:
                raise BadInput("is an empty file", "files with something in them")
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file

    def close(self) -> None:
        """Its stores."""
        for store in self._stores.values():
            store.close()

    def _from_store(self, place: Place, target: IO[bytes], ticket: Ticket) -> None:
        def read() -> None:
            target.seek(0)
            target.truncate()
            for piece in self._store(place.host).read(place.path[1:]):
                if target.tell() + len(piece) > self.limits.bytes:
                    raise too_large(self.limits.bytes)
                target.write(piece)
                if ticket.over.is_set():
                    raise StorageUnavailable("not wanted any more")

        def read_once_allowed() -> None:
            try:
                read()
            except StorageUnavailable as error:
                if not ticket.over.is_set() and self._waiting.due():
                    log.warning("input files wait, their store does not answer: %s", error)
                raise
            except StorageDenied as error:  # an expired token, a wrong clock: no job is at fault
                if self._waiting.due():
                    log.warning("input files wait, their store refuses this worker: %s", error)
                raise StorageUnavailable(str(error)) from error

        try:
            retrying(
                read_once_allowed, lambda _: not ticket.over.is_set(), backoff=Backoff(), stop=ticket.over
            )
        except NotFound as error:
            raise BadInput("there is no such object", "objects that are there") from error
        except InvalidKey as error:
            raise BadInput("has a key that is not read", "parts of letters, digits and _+=@,.~-") from error
        except (StorageRefused, StorageConfigError) as error:
            raise BadInput(
                f"the store does not give it to this worker ({type(error).__name__})",
                "objects that the worker's credentials may read",
            ) from error

    def _store(self, bucket: str) -> Storage:
        with self._lock:
            if bucket not in self._stores:
                self._stores[bucket] = self._open_store(f"s3://{bucket}")
            return self._stores[bucket]
