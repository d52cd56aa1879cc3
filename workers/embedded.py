"""Everything on this machine: a private Redis, a folder as store, one worker. Stops what it started.

The data folder keeps the queue, so the same command after a crash goes on where it was. One process at a time may
use a folder: it holds a lock on it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from saggar.jobs.settings import JobSettings
from saggar.workers.servers import RedisServer, ServerError
from saggar.workers.settings import HANDED_ON, WorkerSettings
from saggar.workers.supervisor import CANNOT_START

# Results of an embedded run stay known for a month: running the file again must find them.
RECORD_TTL_S = 30 * 24 * 3600


class Busy(ServerError):
    """Another process uses this data folder."""


@dataclass
class EmbeddedCluster:
    """A queue and one worker under one folder: `with EmbeddedCluster(folder, flags) as cluster: ...`.

    Raises Busy when the folder is in use, ServerError when a server does not start.
    """

    folder: Path
    flags: dict[str, object]
    settings: WorkerSettings = field(init=False)
    worker: subprocess.Popen[bytes] = field(init=False)
    redis: RedisServer = field(init=False)
    _stack: ExitStack = field(default_factory=ExitStack, repr=False)
    _log_began: int = field(default=0, init=False, repr=False)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FolderLock(self.folder / "lock"))
            self.redis = RedisServer(self.folder / "redis")
            stack.callback(self.redis.stop)  # first: whatever interrupts its start
            self.redis.start()
            jobs = JobSettings(redis_url=self.redis.url, record_ttl_s=RECORD_TTL_S)
            # The environment may speak of another cluster: here only flags count.
            self.settings = WorkerSettings.load(
                {"spool": self.folder / "spool", **self.flags, "jobs": jobs}, environ={}
            )
            self.worker = self._start_worker()
            stack.callback(self._stop_worker)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def log(self) -> Path:
        return self.folder / "worker.log"

    def last_words(self, characters: int = 1500) -> str:
        """Why the worker could not start, in its own line; else how its log of this start ends, from a new line on."""
        with self.log.open("rb") as log:
            log.seek(self._log_began)
            said = log.read().decode(errors="replace").strip()
        _, refused, why = said.rpartition(CANNOT_START)
        return why if refused else f"\n{said[-characters:]}"

    def _start_worker(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as sink:
            self._log_began = sink.tell()  # behind what earlier starts have said
            return subprocess.Popen(
                [sys.executable, "-m", "saggar.workers.supervisor"],
                env=os.environ | {HANDED_ON: self.settings.handed_on},
                stdout=sink,
                stderr=sink,
                stdin=subprocess.PIPE,
                start_new_session=True,
            )

    def _stop_worker(self) -> None:
        while self.redis.ended and self.worker.poll() is None:
            # Nothing can be given back any more, and it would try to for all of its time: it is interrupted twice.
            self.worker.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.worker.wait(0.5)
        self.worker.terminate()
        try:
            self.worker.wait(self.settings.grace_s + 5)
        except subprocess.TimeoutExpired:
            self.worker.kill()
            self.worker.wait()


class FolderLock:
    """One process at a time. Entering raises Busy when another one is in."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        self._file = self._path.open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(
                f"another saggar uses {self._path.parent}: wait for it, or choose another --data"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
