"""Jobs whose input files are on the way: a few threads fetch them, for however many jobs, and let the jobs into the
engine. A job that waits for its turn has no thread, and one that is stopped meanwhile leaves at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from saggar.engine.handle import Handle, Reservation
from saggar.jobs.schema import Job
from saggar.workers.attempts import Attempt
from saggar.workers.inbox import Inbox
from saggar.workers.inputs.decoders import Stopped
from saggar.workers.inputs.fetch import Ticket
from saggar.workers.inputs.load import FETCHING, from_web
from saggar.workers.service import Service


@dataclass(eq=False, slots=True)
class Fetch:
    """A job in this step, which may be cancelled. Its end is one call of `entered` or `failed`, from any thread."""

    job: Job
    attempt: Attempt
    reservation: Reservation | None
    entered: Callable[[Handle], None]
    failed: Callable[[Exception], None]
    inbox: Inbox[Fetch]
    ticket: Ticket = field(default_factory=Ticket)

    def cancel(self) -> bool:
        """Ends the fetching, and the waiting for it."""
        self.ticket.cancel()
        if self.inbox.take_back(self):
            self.failed(Stopped())
        return True


class Fetches:
    """Threads begin with the first job that needs them. Close it, once nothing is left in it."""

    def __init__(self, service: Service, threads: int = FETCHING) -> None:
        self._service = service
        self._most = threads
        self._inboxes: dict[bool, Inbox[Fetch]] = {}
        self._threads: list[threading.Thread] = []

    def put(
        self,
        job: Job,
        attempt: Attempt,
        reservation: Reservation | None,
        entered: Callable[[Handle], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """From one thread: a job that has passed all checks but those of its files."""
        inbox = self._inbox(from_web(job))
        fetch = Fetch(job, attempt, reservation, entered, failed, inbox)
        self._service.files.expect(attempt, fetch, reservation)
        inbox.put(fetch)
        if fetch.ticket.over.is_set():  # told between the two, when there was nothing to take back yet
            fetch.cancel()

    def close(self) -> None:
        for inbox in self._inboxes.values():
            inbox.close()
        for thread in self._threads:
            thread.join()

    def _inbox(self, web: bool) -> Inbox[Fetch]:
        """That of the files over https, where others' hosts may be slow, or of those from folders and buckets."""
        if web not in self._inboxes:
            inbox = self._inboxes[web] = Inbox()
            new = [
                threading.Thread(
                    target=self._serve, args=(inbox,), name=f"saggar-fetch-{number}", daemon=True
                )
                for number in range(len(self._threads), len(self._threads) + self._most)
            ]
            self._threads += new
            for thread in new:
                thread.start()
        return self._inboxes[web]

    def _serve(self, inbox: Inbox[Fetch]) -> None:
        while fetches := inbox.take(1):
            self._do(fetches.pop())

    def _do(self, fetch: Fetch) -> None:
        try:
            handle = self._service.enter_with_files(fetch.job, fetch.attempt, fetch.reservation, fetch.ticket)
        except Exception as error:  # noqa: BLE001  (the job's end says what it is)
            fetch.failed(error)
        else:
            fetch.entered(handle)
