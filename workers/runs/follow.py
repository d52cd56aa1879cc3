"""Submitting a run and following it to its end, with one line of progress."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from saggar.jobs.client import JobClient
from saggar.jobs.errors import QueueFull, SaggarError
from saggar.jobs.events import Event
from saggar.jobs.record import TERMINAL
from saggar.jobs.schema import Job

_IDLE_S = 2.0


@dataclass
class Tally:
    """How a run stands: ends by state, and the sizes of the batches in which its jobs ran."""

    planned: int
    ends: Counter[str] = field(default_factory=Counter)
    batches: dict[str, int] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def ended(self) -> int:
        return sum(self.ends.values())

    @property
    def failed(self) -> int:
        return self.ended - self.ends["succeeded"]

    @property
    def mean_batch(self) -> float:
        return sum(self.batches.values()) / len(self.batches) if self.batches else 0.0

    @property
    def rate(self) -> float:
        """Jobs that ended, a second, since the run was followed."""
        return self.ended / max(time.monotonic() - self.began, 1e-3)


def submit_all(client: JobClient, jobs: Sequence[Job]) -> dict[str, str]:
    """Queues what is not queued yet, waiting where the lane is full; the state of each job by id.

    Raises what a submit raises: the jobs were checked before, so that is a conflict or a lost server.
    """
    states: dict[str, str] = {}
    todo = list(jobs)
    while todo:
        full: QueueFull | None = None
        again: list[Job] = []
        for job, outcome in zip(todo, client.submit_many(todo), strict=True):
            if isinstance(outcome, QueueFull):
                full = outcome
                again.append(job)
            elif isinstance(outcome, SaggarError):
                raise outcome
            else:
                states[outcome.id] = outcome.state
        if full is not None:
            time.sleep(full.retry_after_s)
        todo = again
    return states


def retry_failed(client: JobClient, states: dict[str, str]) -> int:
    """Queues again what failed in an earlier round; how many."""
    failed = [job_id for job_id, state in states.items() if state == "failed"]
    for job_id in failed:
        states[job_id] = client.retry(job_id).state
    return len(failed)


def follow_run(
    client: JobClient,
    run: str,
    states: dict[str, str],
    alive: Callable[[], None],
    show: Callable[[Tally], None],
) -> Tally:
    """Reads the run's events until every job of `states` has ended. `alive` may raise when nobody works any more."""
    tally = Tally(planned=len(states))
    open_ids = set()
    for job_id, state in states.items():
        if state in TERMINAL:
            tally.ends[state] += 1
        else:
            open_ids.add(job_id)
    cursor: str | None = None
    while open_ids:
        for event in client.events(run=run, after=cursor, idle_s=_IDLE_S):
            if event.kind == "gap":  # some events are gone: the records say what they said
                _look_up(client, open_ids, tally)
            cursor = event.cursor
            if event.job in open_ids and event.ended and _has_ended(client, event):
                open_ids.discard(event.job)
                tally.ends[event.kind] += 1
                if batch := event.data.get("batch_id"):
                    tally.batches[str(batch)] = int(str(event.data.get("batch_size", 1)))
            show(tally)
            if not open_ids:
                break
        alive()
        if open_ids and cursor is None:
            _look_up(client, open_ids, tally)
    return tally


def _has_ended(client: JobClient, event: Event) -> bool:
    """A job may have been tried again after it failed: only its record knows. Success is final."""
    return event.kind == "succeeded" or client.status(str(event.job)).ended


def _look_up(client: JobClient, open_ids: set[str], tally: Tally) -> None:
    """Events were trimmed or have expired: what ended is read from the records."""
    for job_id in list(open_ids):
        record = client.status(job_id)
        if record.ended:
            open_ids.discard(job_id)
            tally.ends[record.state] += 1


@contextmanager
def progress_line(console: Console, total: int) -> Iterator[Callable[[Tally], None]]:
    """A bar with what counts; on something that is no terminal only the last line is printed."""
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.1f}/s"),
        TextColumn("batch {task.fields[batch]:.1f}"),
        TextColumn("[red]{task.fields[failed]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("pictures", total=total, rate=0.0, batch=0.0, failed="")

        def show(tally: Tally) -> None:
            failed = f"{tally.failed} failed" if tally.failed else ""
            progress.update(
                task, completed=tally.ended, rate=tally.rate, batch=tally.mean_batch, failed=failed
            )

        yield show
