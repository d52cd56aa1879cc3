"""Which rows of a run have texts that are longer than the model reads.

_runs/NAME/unread/*.jsonl   while it runs: written before their rows are settled, so that a crash forgets none
_runs/NAME/unread.jsonl     at its end: a row a line, in their order; not there when all was read
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

from pydantic import BaseModel, ConfigDict, ValidationError
from saggar.jobs.record import UnreadText
from saggar.jobs.runs import Ended
from saggar.storage.base import Storage
from saggar.storage.errors import Conflict, NotFound

_JSONL = "application/x-ndjson"


class UnreadRow(BaseModel):
    """A line: the row's number, its job, and what was not read of its texts."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    row: int
    job: str
    unread: tuple[UnreadText, ...]


class UnreadRows:
    """Of the run whose own objects are under `base`. Every method raises what a store raises."""

    def __init__(self, storage: Storage, base: str) -> None:
        self._storage = storage
        self._parts = f"{base}/unread/"
        self.key = f"{base}/unread.jsonl"

    def note(self, ended: Sequence[Ended]) -> None:
        """Puts those of these rows that have any. What is noted twice counts once."""
        rows = [
            UnreadRow(row=one.n, job=one.record.id, unread=one.record.result.unread)
            for one in ended
            if one.record.result is not None and one.record.result.unread
        ]
        if rows:
            self._put(f"{self._parts}{rows[0].row:08d}-{uuid.uuid4().hex[:8]}.jsonl", rows)

    def rows(self) -> list[UnreadRow]:
        """All that are known now, in order. Raises Conflict when they are not to be understood."""
        found = {row.row: row for key in (self.key, *self._noted()) for row in self._read(key)}
        return [found[n] for n in sorted(found)]

    def gather(self) -> list[UnreadRow]:
        """The same, from now on in one object. May be called again after a crash."""
        noted, rows = self._noted(), self.rows()
        if noted:
            self._put(self.key, rows)
            self._storage.delete(noted)
        return rows

    def _noted(self) -> list[str]:
        return [info.key for info in self._storage.list(self._parts)]

    def _read(self, key: str) -> Iterator[UnreadRow]:
        try:
            data = self._storage.get(key)
        except NotFound:
            return
        try:
            yield from map(UnreadRow.model_validate_json, data.splitlines())
        except ValidationError as error:
            raise Conflict(f"{key} cannot be read: {error.error_count()} errors") from error

    def _put(self, key: str, rows: Sequence[UnreadRow]) -> None:
        data = "".join(f"{row.model_dump_json()}\n" for row in rows)
        self._storage.put(key, data.encode(), content_type=_JSONL)


def in_words(rows: Sequence[UnreadRow]) -> str:
    """How many, and how much the model reads: "3 rows have a text that is longer than the model reads (75 tokens)"."""
    reads = sorted({one.read_tokens for row in rows for one in row.unread})
    span = f"{reads[0]} tokens" if len(reads) == 1 else f"{reads[0]} to {reads[-1]} tokens"
    have = "row has" if len(rows) == 1 else "rows have"
    return f"{len(rows)} {have} a text that is longer than the model reads ({span})"
