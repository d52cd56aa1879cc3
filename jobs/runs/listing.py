"""The jobs of a run by their records, all pages of them, whether a row knows them or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from saggar.jobs.record import OPEN, JobRecord, State

if TYPE_CHECKING:
    from saggar.jobs.client import JobClient

_PAGE = 1000


def records_of(client: JobClient, run: str, *states: State) -> Iterator[JobRecord]:
    """Those in one of these states, read a page at a time. Errors of Redis pass through."""
    for state in states:
        cursor: str | None = None
        while True:
            page = client.list(run=run, state=state, limit=_PAGE, cursor=cursor)
            yield from page.records
            if (cursor := page.cursor) is None:
                break


def stop_jobs(client: JobClient, run: str) -> set[str]:
    """Cancels every job of a run that is queued or running, also those that no row waits for: of a controller that
    died when it had queued them, or taken them out of its window. Their ids."""
    # Listed before any is touched, since that moves them.
    stopped = {record.id for record in records_of(client, run, *OPEN)}
    for job_id in stopped:
        client.cancel(job_id)
    return stopped
