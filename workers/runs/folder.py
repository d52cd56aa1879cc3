"""What a run keeps beside its output: its normalised manifest in parts, `run.json`, and at the end `_SUCCESS`.

_runs/NAME/manifest/00000-8c1f2a90.jsonl   jobs, one a line, at most 2,000 a part; its name has of its hash, so that
                                           two who plan a run of one name at a time leave each other's parts alone
_runs/NAME/run.json                        names the parts with their hashes; written after them
_runs/NAME/unread.jsonl                    rows whose texts are longer than the model reads: unread.py
_runs/NAME/_SUCCESS                        written last
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from saggar.jobs.runs.record import RunSpec
from saggar.jobs.schema import Job, read_job
from saggar.storage.base import Storage
from saggar.storage.errors import Conflict, NotFound
from saggar.workers.runs.report import RunSummary, write_report
from saggar.workers.runs.unread import UnreadRows

PART_ROWS = 2_000
_JSONL, _JSON = "application/x-ndjson", "application/json"


class PlanPart(BaseModel):
    """Rows `first` to `first + count - 1` of a run."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    key: str
    first: int
    count: int
    sha256: str


class RunIndex(BaseModel):
    """The content of run.json."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int = 1
    spec: RunSpec
    parts: tuple[PlanPart, ...] = Field(default=())

    @property
    def planned(self) -> int:
        return sum(part.count for part in self.parts)


class RunFolder:
    """A run's own objects in its target. It is the plan that a controller reads."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage = storage
        self.base = f"_runs/{name}"
        self.unread = UnreadRows(storage, self.base)
        self._index: RunIndex | None = None

    def index(self, *, fresh: bool = False) -> RunIndex | None:
        """None: this target knows no such run. `fresh`: reads it again. Raises Conflict when it is not to be
        understood."""
        if self._index is None or fresh:
            try:
                self._index = RunIndex.model_validate_json(self.storage.get(self._index_key))
            except NotFound:
                return None
            except ValidationError as error:
                raise Conflict(
                    f"{self.base}/run.json cannot be read: {error.error_count()} errors"
                ) from error
        return self._index

    def write_plan(self, spec: RunSpec, lines: Iterator[str], before: RunIndex | None = None) -> RunIndex:
        """Puts the rows in parts (behind those of `before`), then run.json. May be called again after a crash.

        Without `before` this is a new run: where somebody else was faster, theirs stands and is returned."""
        parts = list(before.parts) if before else []
        first = sum(part.count for part in parts)
        while rows := list(islice(lines, PART_ROWS)):
            data = "".join(f"{row}\n" for row in rows).encode()
            sha256 = hashlib.sha256(data).hexdigest()
            key = f"{self.base}/manifest/{len(parts):05d}-{sha256[:8]}.jsonl"
            self.storage.put(key, data, content_type=_JSONL)
            parts.append(PlanPart(key=key, first=first, count=len(rows), sha256=sha256))
            first += len(rows)
        index = RunIndex(spec=spec, parts=tuple(parts))
        standing = self.write_index(index) if before else self._first_index(index)
        self._tidy(index, standing)
        return standing

    def write_index(self, index: RunIndex) -> RunIndex:
        self.storage.put(self._index_key, _json(index), content_type=_JSON)
        self._index = index
        return index

    def mend(self, digest: str, planned: int, hold: Callable[[], None]) -> None:
        """The plan of so many rows, which the ledger of runs knows, and no more: somebody who wanted to extend the run
        was killed before it heard of it. `hold` raises what says that it knows more by now."""
        index = self.index(fresh=True)
        if index is None:
            return
        parts = tuple(part for part in index.parts if part.first + part.count <= planned)
        named = {part.key for part in parts}
        there = [info.key for info in self.storage.list(f"{self.base}/manifest/")]
        left = [key for key in there if key not in named]
        if left or parts != index.parts:
            hold()  # after the look: what was there then, and is not named, is nobody's
            if parts != index.parts:
                spec = index.spec.model_copy(update={"digest": digest, "planned": planned})
                self.write_index(index.model_copy(update={"spec": spec, "parts": parts}))
            self.storage.delete(left)

    def _first_index(self, index: RunIndex) -> RunIndex:
        if not self.storage.conditional_put:
            return self.write_index(index)
        if not self.storage.put_if_absent(self._index_key, _json(index), content_type=_JSON):
            return self.index(fresh=True) or self._first_index(index)
        self._index = index
        return index

    def _tidy(self, ours: RunIndex, standing: RunIndex) -> None:
        """Parts that no index will name go: of plans that were broken off, or ours where another's stands."""
        named = {part.key for part in standing.parts}
        found = (info.key for info in self.storage.list(f"{self.base}/manifest/"))
        known = found if ours == standing else (part.key for part in ours.parts)
        self.storage.delete([key for key in known if key not in named])

    @property
    def _index_key(self) -> str:
        return f"{self.base}/run.json"

    def rows(self, first: int) -> Iterator[tuple[int, Job]]:
        """As Plan.rows. Raises NotFound and Conflict when the plan is damaged."""
        for n, text in self._texts(first):
            yield n, read_job(text)

    def ids(self) -> Iterator[str]:
        """The id of each row's first draw, in order."""
        return (job.id for _, job in self.rows(0))

    def succeed(self, text: bytes) -> None:
        """Everything is in place: `_SUCCESS`, with the counts."""
        self.storage.put(f"{self.base}/_SUCCESS", text, content_type=_JSON)

    def succeeded(self) -> bool:
        """Whether `_SUCCESS` is there."""
        return self.storage.head(f"{self.base}/_SUCCESS") is not None

    def report(self, summary: RunSummary, sheet: bytes | None) -> str:
        """`report.json` and `report.html`; the URI of the page."""
        return write_report(self.storage, self.base, summary, sheet)

    def write_accepted(self, lines: Iterable[str]) -> None:
        """`accepted.jsonl`: which outputs of which jobs count. Written aside first: it has a line for each row."""
        with tempfile.NamedTemporaryFile("w", prefix="saggar-accepted-", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            self.storage.put(f"{self.base}/accepted.jsonl", Path(file.name), content_type=_JSONL)

    def unfinish(self) -> None:
        """There is more to make: `_SUCCESS` goes first."""
        self.storage.delete([f"{self.base}/_SUCCESS"])

    def _texts(self, first: int) -> Iterator[tuple[int, str]]:
        index = self.index(fresh=True)  # somebody may have extended it
        if index is None:
            raise NotFound(f"{self.base}/run.json")
        for part in index.parts:
            if part.first + part.count <= first:
                continue
            data = self.storage.get(part.key)
            if hashlib.sha256(data).hexdigest() != part.sha256:
                raise Conflict(f"{part.key} holds other bytes than run.json says")
            for i, text in enumerate(data.decode().split("\n")[:-1]):
                if part.first + i >= first:
                    yield part.first + i, text


def _json(index: RunIndex) -> bytes:
    return index.model_dump_json(indent=2).encode()
