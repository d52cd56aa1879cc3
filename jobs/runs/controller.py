"""The controller of a run: keeps its window full, takes each row to its end, and can be killed anywhere.

Everything it knows is in Redis and in the plan; what it keeps in memory is the window. The order makes it exact: a job
is submitted (its id says which row and draw it is, so twice is once) before its row is marked, a row is settled after
its result is where it shall be, and a record is forgotten after its row is settled.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from saggar.jobs.errors import Conflict, NotRetryable, QueueFull, SaggarError, UnknownJob
from saggar.jobs.ledger.parse import Submitted
from saggar.jobs.record import TERMINAL
from saggar.jobs.runs.contract import Ended, Finisher, KeepAll, Plan, Verdict
from saggar.jobs.runs.ends import Ends, News
from saggar.jobs.runs.ledger import LeaseLost, RunLedger, Settled
from saggar.jobs.runs.listing import stop_jobs
from saggar.jobs.runs.record import Run, RunState
from saggar.jobs.runs.rows import chunks, not_made, redrawn, settled
from saggar.jobs.schema import Job

if TYPE_CHECKING:
    import redis
    from saggar.jobs.client import JobClient

CHUNK = 500
"""Rows queued, or ends taken in, between two looks at the run."""
EVENTS = 4 * CHUNK
"""Events of a run that stay as records of it go."""
FEW, LINGER_S = 100, 0.02
"""After so few ends it is waited for more: each look costs as much whatever it finds."""
LOOK_S = 10.0
"""Without news of the window its records are looked at: an event may have been trimmed away."""
KEPT = 1_000
"""Ended jobs of the run whose records stay, to look at; those before them are forgotten."""


class Controller:
    """One run, for one holder at a time. `step` again and again, from one thread."""

    def __init__(
        self,
        name: str,
        client: JobClient,
        redis_client: redis.Redis,
        plan: Plan,
        finisher: Finisher | None = None,
        token: str | None = None,
    ) -> None:
        self.name = name
        self.token = token or uuid.uuid4().hex
        self.runs = RunLedger(redis_client, client.settings)
        self._client = client
        self._redis = redis_client
        self._plan = plan
        self.finisher = finisher or KeepAll()
        self._ended: dict[str, None] = {}
        """Jobs whose records are not needed any more, in the order of their ends."""
        self._stride = 0
        self._there: list[str] = []
        """Draws that had succeeded before they were asked for."""
        self.resync()

    def resync(self) -> None:
        """Forgets what is in memory: the next step reads it anew. After an error of Redis, call this and step again."""
        self._open: dict[str, tuple[int, int]] = {}
        self._ends: Ends | None = None
        self._reader: Iterator[tuple[int, Job]] = iter(())
        self._at = -1
        self._looked = 0.0
        self._full_until = 0.0
        self._told: set[str] = set()
        self._state = ""

    def lost(self) -> None:
        """Somebody else has, or had, the run, and may have done anything with it: everything is read anew."""
        self.resync()
        self._ended.clear()
        self.finisher.restart()

    def hold(self) -> None:
        """Renews the lease. Raises LeaseLost: whoever was asleep for too long does nothing more."""
        self.runs.hold(self.name, self.token)

    def claim(self, *, force: bool = False) -> bool:
        """Takes or keeps the run; False: another one has it. Raises UnknownRun.

        A lease that had ended is as good as lost: somebody may have had the run, and be gone again."""
        claimed = self.runs.claim(self.name, self.token, force=force)
        if claimed == "taken":
            self.lost()
        return claimed is not None

    def step(self, wait_s: float = 0.5) -> Run:
        """One look: queue what there is room for, settle what ended, wait for at most so long if neither.

        Raises LeaseLost, UnknownRun, whatever the finisher raises, and redis.RedisError.
        """
        if not self.claim():
            raise LeaseLost(self.name)
        run = self.runs.get(self.name)
        self._stride = run.spec.seed_stride
        busy = self._sync() | self._move(run)
        busy |= self._take_in(wait_s if not busy else 0.0)
        self.finisher.tend(run)
        self._forget()
        return self._after(self.runs.get(self.name))

    # -- queueing

    def _move(self, run: Run) -> bool:
        if run.state != self._state:  # what was told to jobs in another state was something else
            self._told.clear()
            self._state = run.state
        if run.state == "running":
            return self._feed(run)
        if run.state == "paused":
            self._withdraw()
        elif run.state == "cancelled":
            self._void(run)
        return False

    def _feed(self, run: Run) -> bool:
        """Fills the window in chunks. True: there may be room for more at once."""
        window = run.spec.window
        room = min(window - len(self._open), CHUNK)
        first = self._first(run)
        if first >= run.planned or room <= min(window // 8, CHUNK - 1) or time.monotonic() < self._full_until:
            return False
        if first != self._at:
            self._reader, self._at = self._plan.rows(first), first
        part = list(islice(self._reader, room))
        if not part or part[0][0] != first:
            raise SaggarError(
                f"the plan of run {self.name} has {run.planned} rows, and row {first} is not there"
            )
        letters = self.runs.rows(self.name, first, len(part))
        wanted = [(n, job) for (n, job), letter in zip(part, letters, strict=True) if letter == "."]
        cursor = self._queue(wanted, part[-1][0] + 1)
        self._at = cursor if cursor == part[-1][0] + 1 else -1
        return cursor == part[-1][0] + 1

    def _first(self, run: Run) -> int:
        """The row to go on with: the cursor, or, where that is at the end, one that was put back behind its back."""
        if run.cursor < run.planned or not run.waiting:
            return run.cursor
        return next(self.runs.rows_in(self.name, "."), run.planned)

    def _queue(self, rows: Sequence[tuple[int, Job]], after: int) -> int:
        """Submits and marks these rows; the row to go on with: `after`, or the one for which the lane had no room."""
        entries: list[tuple[str, int]] = []
        refused: list[Settled] = []
        before: list[str] = []
        self.hold()
        outcomes = self._client.submit_many([job for _, job in rows])
        for (n, job), outcome in zip(rows, outcomes, strict=True):
            if isinstance(outcome, QueueFull):
                self._full_until = time.monotonic() + outcome.retry_after_s
                after = min(after, n)
                continue
            entries.append((job.id, n))
            if isinstance(outcome, Submitted) and outcome.id != job.id:
                # Of an older plan, whose rows had keys of their own.
                outcome = Conflict("idempotency_key", outcome.id, "id")  # noqa: PLW2901
            if isinstance(outcome, SaggarError):
                refused.append(Settled(n, job.id, "f", kind="refused", message=str(outcome)[:500]))
            elif self._was_there(outcome):
                before.append(job.id)
        self.runs.mark(self.name, self.token, after, entries)
        for job_id, n in entries:
            self._enter(job_id, n, 0)
        if refused:
            self._settle(refused)
        self._take_up(before)
        return after

    def _enter(self, job_id: str, n: int, draw: int) -> None:
        """It is open, perhaps again: its record is needed."""
        self._open[job_id] = (n, draw)
        self._ended.pop(job_id, None)

    def _was_there(self, outcome: Submitted) -> bool:
        """Whether it has succeeded before. One that ended otherwise is tried again: its row waits to be made."""
        if outcome.created or outcome.state not in TERMINAL:
            return False
        return outcome.state == "succeeded" or not self._retried(outcome.id)

    def _retried(self, job_id: str) -> bool:
        self.hold()  # it may have failed under somebody else
        try:
            self._client.retry(job_id)
        except (NotRetryable, UnknownJob):  # it succeeded, or was forgotten, in between: its record says
            return False
        return True

    def _withdraw(self) -> None:
        """Paused: what waits leaves the queue and is queued again later; what runs goes on to its end."""
        waiting = [job_id for job_id in self._open if job_id not in self._told]
        for part in chunks(waiting, CHUNK):
            records = self._client.statuses(part)
            queued = [record.id for record in records if record is not None and record.state == "queued"]
            self._told |= set(part)
            # The row first: a crash in between leaves a job that nobody asks for, and that queueing finds again.
            places = {job_id: self._open[job_id] for job_id in queued if self._open[job_id][1] == 0}
            self._settle([Settled(n, job_id, ".") for job_id, (n, _) in places.items()])
            running = [
                (job_id, n)
                for job_id, (n, _) in places.items()
                if self._client.cancel(job_id, waiting_only=True).outcome == "requested"
            ]
            if running:
                self.runs.mark(self.name, self.token, self.runs.get(self.name).cursor, running)
                for job_id, n in running:
                    self._enter(job_id, n, 0)

    def _void(self, run: Run) -> None:
        """Cancelled: nothing more is queued, and what is open stops. So do jobs that no row waits for."""
        if run.closed:
            return
        self.runs.void(self.name)
        if not self._told:
            self._told |= stop_jobs(self._client, self.name)
        for job_id in [job_id for job_id in self._open if job_id not in self._told]:
            self._client.cancel(job_id)
            self._told.add(job_id)

    # -- what ended

    def _sync(self) -> bool:
        """Reads the window after a start; looks at its records when there was no news for long."""
        first = self._ends is None
        if self._ends is None:
            self._ends = Ends(
                self._redis, self._client.settings, self.name
            )  # before the look, so that nothing is missed
            self._open = self.runs.opened(self.name)
        if not first and time.monotonic() - self._looked < LOOK_S:
            return False
        self._look_over()
        return first

    def _look_over(self) -> None:
        for part in chunks(list(self._open), CHUNK):
            self._take_up(part)
        self._looked = time.monotonic()

    def _take_in(self, wait_s: float) -> bool:
        assert self._ends is not None
        news = self._ends.read(wait_s)
        if 0 < len(news.ids) < FEW and wait_s > 0:
            time.sleep(LINGER_S)
            more = self._ends.read(0.0)
            news = News([*news.ids, *more.ids], news.gap or more.gap)
        ours = [job_id for job_id in dict.fromkeys(news.ids) if job_id in self._open]
        for part in chunks(ours, CHUNK):
            self._take_up(part)
        if ours:
            self._looked = time.monotonic()
        if news.gap:
            self._look_over()
        return bool(ours)

    def _take_up(self, job_ids: Sequence[str]) -> None:
        """Settles those of these open jobs that have ended; only their records know."""
        if not job_ids:
            return
        done: list[Ended] = []
        ends: list[Settled] = []
        for job_id, record in zip(job_ids, self._client.statuses(job_ids), strict=True):
            n, draw = self._open[job_id]
            if record is None:  # its record is gone, with whatever it said
                ends.append(Settled(n, job_id, "."))
            elif record.state == "succeeded":
                done.append(Ended(n, draw, record))
            elif record.ended:
                ends.append(not_made(n, record))
        self._settle(ends)
        for part in chunks(done, 50):
            verdicts = self.finisher.judge(part)
            self._there = []
            judged = [self._judged(one, verdict) for one, verdict in zip(part, verdicts, strict=True)]
            self._settle([one for one in judged if one is not None])
            self._take_up(self._there)

    def _judged(self, one: Ended, verdict: Verdict) -> Settled | None:
        if verdict.to == "redraw":
            return self._draw_again(one, verdict)
        if verdict.to == "again":
            return self._make_again(one)
        return settled(one, verdict, keep=self.finisher.needs_records)

    def _draw_again(self, one: Ended, verdict: Verdict) -> Settled:
        """Queues the row's next draw. A lane without room puts the whole row back: it waits its turn."""
        job = redrawn(one.record.job, one.draw, self._stride)
        if (refused := self._submit(job, one)) is not None:
            return refused
        self._enter(job.id, one.n, one.draw + 1)
        return Settled(
            one.n,
            one.record.id,
            "q",
            next=job.id,
            draw=one.draw + 1,
            bytes=verdict.bytes,
            picks=verdict.picks,
            refused=verdict.refused or None,
        )

    def _make_again(self, one: Ended) -> Settled | None:
        """What it has made is gone: the same draw is queued once more, under its place in the window. Its record goes
        first, or it would be found as it is."""
        self.runs.forget(self.name, [one.record.id], events=EVENTS, token=self.token)
        return self._submit(one.record.job, one)

    def _submit(self, job: Job, one: Ended) -> Settled | None:
        """Queues a job for this row; what becomes of the row where that cannot be."""
        (outcome,) = self._client.submit_many([job])
        if isinstance(outcome, QueueFull):
            return Settled(one.n, one.record.id, ".")
        if isinstance(outcome, SaggarError):
            return Settled(one.n, one.record.id, "f", kind="refused", message=str(outcome)[:500])
        if self._was_there(outcome):
            self._there.append(job.id)
        return None

    def _settle(self, ends: Sequence[Settled]) -> None:
        if not ends:
            return
        self.runs.settle(self.name, self.token, ends)
        for one in ends:
            del self._open[one.id]
            self._told.discard(one.id)
            if one.to == ".":
                self._at = -1 if self._at > one.n else self._at
            elif not (one.to in "dq" and self.finisher.needs_records):
                self._ended[one.id] = None

    def let_go(self, job_ids: Sequence[str]) -> None:
        """The records of these rows' jobs are not needed any more."""
        self._ended |= dict.fromkeys(job_ids)

    def _forget(self) -> None:
        old = list(islice(self._ended, max(0, len(self._ended) - KEPT)))
        for part in chunks(old, CHUNK):
            self.runs.forget(self.name, part, events=EVENTS, token=self.token)
            for job_id in part:
                del self._ended[job_id]

    # -- the end

    def _after(self, run: Run) -> Run:
        if run.complete:
            return self._finish(run)
        spec, why = run.spec, ""
        if spec.max_failures is not None and run.failed >= spec.max_failures:
            why = f"{run.failed} rows failed"
        elif spec.time_budget_s is not None and run.round_s >= spec.time_budget_s:
            why = f"its time of {spec.time_budget_s:g} s is spent"
        if why and run.state == "running":
            self._change("paused", why)
            return self.runs.get(self.name)
        return run

    def _finish(self, run: Run) -> Run:
        """Every row has its end. What was paused then is done all the same."""
        if run.state == "done" or run.closed:
            return run
        self.finisher.complete(run)
        now = self.runs.get(self.name)
        if not now.complete or now.state != run.state:  # lost and made again; or cancelled at this moment
            return now
        if run.state == "cancelled":
            self.runs.close(self.name, self.token)
        else:
            if run.state == "paused":
                self._change("running")
            self._change("done", run.why)
        return self.runs.get(self.name)

    def _change(self, to: RunState, why: str = "") -> None:
        self.runs.change(self.name, to, why, token=self.token)
