"""What a controller asks of the world outside the queue: a plan to read, and a finisher that judges results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from saggar.jobs.record import JobRecord
from saggar.jobs.runs.record import Run
from saggar.jobs.schema import Job


@dataclass(frozen=True, slots=True)
class Ended:
    """A job of row `n` that has succeeded: its draw, from 0, and its record."""

    n: int
    draw: int
    record: JobRecord


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to make of it; "again": what it made is gone, and its `result.json` too by now, so that the same draw is
    made once more. `picks`: what was accepted of the row so far, "" none, None all. `why` of one that failed; `bytes`
    that count of this draw; `refused`: the gates that refused a picture each."""

    to: Literal["done", "redraw", "rejected", "failed", "again"]
    picks: str | None = None
    why: str = ""
    bytes: int = 0
    refused: tuple[str, ...] = ()


class Plan(Protocol):
    """The rows of a run, in order, wherever they lie."""

    def rows(self, first: int) -> Iterator[tuple[int, Job]]:
        """Rows from number `first` on, with the job of each, read as they are wanted."""


class Finisher(Protocol):
    """What happens to results beyond the queue: gates, copies, shards."""

    @property
    def needs_records(self) -> bool:
        """Whether records of rows that are done stay until `let_go` is told of them."""

    def judge(self, ended: Sequence[Ended]) -> Sequence[Verdict]:
        """One for each. What is done is where it shall be when this returns."""

    def tend(self, run: Run) -> None:
        """Called between two looks: may write shards of what is done."""

    def complete(self, run: Run) -> None:
        """Every row is settled: writes what comes last. May be called again after a crash. It may also find that
        something is lost, and put rows back: then nothing is complete."""

    def restart(self) -> None:
        """Somebody else has had the run: what is in memory says nothing any more."""


class KeepAll:
    """Everything is accepted where the worker has put it."""

    needs_records = False

    def judge(self, ended: Sequence[Ended]) -> Sequence[Verdict]:
        return [Verdict("done", bytes=bytes_of(one.record)) for one in ended]

    def tend(self, run: Run) -> None:
        """There are no shards."""

    def complete(self, run: Run) -> None:
        """Nothing comes last."""

    def restart(self) -> None:
        """Nothing is in memory."""


def bytes_of(record: JobRecord) -> int:
    """Of all outputs."""
    return sum(output.bytes for output in record.result.outputs) if record.result else 0
