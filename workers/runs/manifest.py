"""A manifest, read whole before anything is queued: every row becomes jobs or an error with its line.

The plan grows in a temporary SQLite file: memory stays flat however many rows there are, and repeated rows are found.
"""

from __future__ import annotations

import hashlib
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from saggar.jobs.errors import ConfigError, InvalidJob
from saggar.jobs.runs.plan import CardOf, Expansion, Row
from saggar.storage.base import Storage
from saggar.storage.uploads import put_upload
from saggar.workers.runs.readers import Columns, read_rows
from saggar.workers.uploads import FileError, planned_uri

SHOWN_REASONS = 100
SHOWN_LINES = 10
_SCHEMA = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
CREATE TABLE jobs (n INTEGER PRIMARY KEY, id TEXT UNIQUE, job TEXT);
CREATE TABLE bad (line INTEGER, reason TEXT);
CREATE TABLE known (id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE files (path TEXT, kind TEXT, uri TEXT, PRIMARY KEY (path, kind)) WITHOUT ROWID;
"""


class Manifest:
    """The jobs of a manifest in order, without repeats, and the rows that cannot run. Close it: it holds a file."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="saggar-plan-")
        self._db = sqlite3.connect(Path(self._folder.name) / "plan.db", isolation_level=None)
        with self._room():
            self._db.executescript(_SCHEMA)
            self._db.execute("BEGIN")
        self.rows = 0
        self.folded = 0
        self.columns = Columns()

    def read(
        self,
        path: Path,
        expansion: Expansion,
        columns: Columns,
        card_of: CardOf,
        uploads: Callable[[], Storage] | None = None,
    ) -> Self:
        """Reads all of it. Local files that it names get the URIs that `upload` will give them in the store of
        `uploads`, which is asked for once there is one; without it they keep their own.

        Raises ConfigError when it cannot be read as a manifest, or has no rows.
        """
        self.columns = columns
        if uploads is not None:
            self._uploads = uploads
            columns.named = self._named
        with self._room():
            for line, row in read_rows(path, columns):
                self.rows += 1
                self._take(line, row, expansion, card_of)
        if not self.rows:
            raise ConfigError(f"{path}: no rows; give one JSON object or one prompt a line")
        return self

    def _take(self, line: int, row: Row | InvalidJob, expansion: Expansion, card_of: CardOf) -> None:
        try:
            if isinstance(row, InvalidJob):
                raise row
            # All of a row's jobs or none: half a matrix would be a surprise.
            jobs = [(job.id, job.to_json()) for job in expansion.jobs(row, card_of)]
        except InvalidJob as error:
            self._db.execute("INSERT INTO bad VALUES (?, ?)", (line, str(error)))
            return
        for job_id, text in jobs:
            added = self._db.execute("INSERT OR IGNORE INTO jobs (id, job) VALUES (?, ?)", (job_id, text))
            self.folded += 1 - added.rowcount

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Raises ConfigError where the plan finds no room."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise ConfigError(
                f"the plan cannot be written under {tempfile.gettempdir()}: {error} (TMPDIR names another folder)"
            ) from None

    def upload(self) -> int:
        """Puts the local files that rows name into the store, those that are not there. How many rows' files there are.
        Raises OSError, StorageError; ConfigError for one that is not what it was when the manifest was read."""
        files = self._db.execute("SELECT DISTINCT path, uri FROM files").fetchall()
        for path, uri in files:
            if put_upload(self._uploads(), Path(path)) != uri:
                raise ConfigError(f"{path} changed while the manifest was read: start again")
        return len(files)

    def _named(self, path: Path, kind: str) -> str:
        """As Columns.named; a file is read once for each kind of input that it is."""
        known = (str(path), kind)
        found = self._db.execute("SELECT uri FROM files WHERE path = ? AND kind = ?", known).fetchone()
        if found is not None:
            return str(found[0])
        try:
            uri = planned_uri(path, self._uploads(), kind)
        except FileError as error:
            allowed = error.allowed or "files that are there: pictures, videos, sounds"
            raise InvalidJob(f"inputs.{kind}", error.problem, allowed) from None
        self._db.execute("INSERT INTO files VALUES (?, ?, ?)", (*known, uri))
        return uri

    @property
    def planned(self) -> int:
        return self._number("SELECT count(*) FROM jobs")

    @property
    def bad(self) -> int:
        """Rows that cannot run."""
        return self._number("SELECT count(*) FROM bad")

    @property
    def digest(self) -> str:
        """Of the ids, in whatever order the rows came: the same rows are the same manifest."""
        hashed = hashlib.sha256()
        for (job_id,) in self._db.execute("SELECT id FROM jobs ORDER BY id"):
            hashed.update(f"{job_id}\n".encode())
        return hashed.hexdigest()[:32]

    def lines(self) -> Iterator[str]:
        """The jobs as JSON, in order."""
        return (text for (text,) in self._db.execute("SELECT job FROM jobs ORDER BY n"))

    def complaint(self) -> str:
        """All bad rows: a reason a line, with the lines that have it."""
        told = []
        reasons = self._db.execute("SELECT reason, count(*) FROM bad GROUP BY reason ORDER BY min(line)")
        for reason, count in reasons.fetchmany(SHOWN_REASONS):
            found = self._db.execute("SELECT line FROM bad WHERE reason = ? LIMIT ?", (reason, SHOWN_LINES))
            lines = [str(line) for (line,) in found]
            more = f" and {count - len(lines)} more" if count > len(lines) else ""
            told.append(f"{'line' if count == 1 else 'lines'} {', '.join(lines)}{more}: {reason}")
        if rest := self._number("SELECT count(DISTINCT reason) FROM bad") - len(told):
            told.append(f"... and {rest} more reasons")
        return "\n".join(told)

    def only_new(self, ids: Iterable[str]) -> tuple[int, str]:
        """Drops the jobs that are among these ids of an older plan. How many are left, and the digest of both
        together."""
        with self._room():
            self._db.executemany("INSERT OR IGNORE INTO known VALUES (?)", ((job_id,) for job_id in ids))
            self._db.execute("DELETE FROM jobs WHERE id IN (SELECT id FROM known)")
        more = self.planned
        hashed = hashlib.sha256()
        for (job_id,) in self._db.execute("SELECT id FROM jobs UNION SELECT id FROM known ORDER BY id"):
            hashed.update(f"{job_id}\n".encode())
        return more, hashed.hexdigest()[:32]

    def close(self) -> None:
        self._db.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _number(self, query: str) -> int:
        (value,) = self._db.execute(query).fetchone()
        return int(value)
