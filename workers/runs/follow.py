"""One line of progress of a run, on a terminal or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from saggar.jobs.runs import Run
from saggar.workers.runs.drive import Meter


@contextmanager
def progress_line(console: Console, run: Run) -> Iterator[Callable[[Run], None]]:
    """A bar with what counts; on something that is no terminal only the last line is printed."""
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.1f}/s"),
        TextColumn("batch {task.fields[batch]:.1f}"),
        TextColumn("[red]{task.fields[trouble]}"),
        TimeRemainingColumn(),
    )
    meter = Meter()
    meter.rate(run)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(
            "jobs", total=run.planned, completed=run.settled, rate=0.0, batch=0.0, trouble=""
        )

        def show(run: Run) -> None:
            progress.update(
                task,
                total=run.planned,
                completed=run.settled,
                rate=meter.rate(run),
                batch=run.mean_batch,
                trouble=trouble(run),
            )

        yield show


def trouble(run: Run) -> str:
    """What did not go as it should: "2 failed, 1 rejected"; "" when all did."""
    counts = {"failed": run.failed, "rejected": run.rejected, "cancelled": run.cancelled}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)
