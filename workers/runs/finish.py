"""The finisher of a run: gates, then delivery as single objects or as shards, and what comes last."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from saggar.jobs.client import JobClient
from saggar.jobs.runs import Controller, Ended, LeaseLost, Run, RunSpec, Verdict
from saggar.jobs.runs.contract import bytes_of
from saggar.jobs.runs.listing import records_of
from saggar.jobs.runs.rows import row_of
from saggar.jobs.schema import Job
from saggar.storage.base import Storage
from saggar.storage.errors import Conflict, NotFound
from saggar.storage.keys import result_key
from saggar.storage.results import read_result
from saggar.workers.runs.deliver import deliver, is_in
from saggar.workers.runs.folder import RunFolder
from saggar.workers.runs.judge import RowGates, draws_of, refused_draws
from saggar.workers.runs.outputs import Made, Outputs, leads, remove
from saggar.workers.runs.pack import MOST_LOST, Done, Packer
from saggar.workers.runs.sheet import MOST, SheetFailed, make_sheet
from saggar.workers.runs.sheet import NAME as SHEET
from saggar.workers.runs.summary import summary_of

log = logging.getLogger(__name__)
_THREADS = 8
_ROWS = 1_000
"""Rows that are looked at, at a time, when the run is complete."""


def staging(name: str) -> str:
    """Where the single objects of a run in shards are, under the workers' store, until they are packed."""
    return f"_runs/{name}/objects"


@dataclass(frozen=True)
class Row:
    """A row of the plan, its letter in the ledger, and what was accepted of it."""

    n: int
    job: Job
    letter: str
    picks: str | None


class RunFinisher:
    """As jobs.runs.Finisher. Close it."""

    def __init__(
        self,
        spec: RunSpec,
        client: JobClient,
        controller: Controller,
        target: Storage,
        folder: RunFolder,
        outputs: Outputs | None = None,
    ) -> None:
        """`outputs`: where workers have put what they made; by default wherever records say. Closes them.

        Raises ConfigError for gates that there are not."""
        self._spec, self._client, self._controller = spec, client, controller
        self._target, self._folder = target, folder
        self._outputs = outputs or Outputs()
        self._pool = ThreadPoolExecutor(_THREADS, "saggar-finish")
        self._gates = RowGates(spec, controller.runs) if spec.gates else None
        self._packer: Packer | None = None
        if spec.format != "objects":
            self._packer = Packer(spec, client, controller, target, folder, self._outputs, self._pool)
        self._refused: list[str] = []
        """Keys of results in the target."""
        self._lost: Counter[str] = Counter()
        self._open = False
        """Whether `_SUCCESS` is known not to be there."""

    @property
    def needs_records(self) -> bool:
        """Shards are made of what the records name."""
        return self._packer is not None

    def judge(self, ended: Sequence[Ended]) -> Sequence[Verdict]:
        """As Finisher.judge. Raises StorageUnavailable and StorageRefused, after which it may be called again."""
        self._controller.hold()
        self._folder.unread.note(ended)
        if self._gates is None:
            verdicts: Sequence[Verdict] = [Verdict("done", bytes=bytes_of(one.record)) for one in ended]
        else:
            judged = self._gates.judge(ended, self._outputs)
            verdicts = [self._or_again(one, verdict) for one, verdict in zip(ended, judged, strict=True)]
        if self._packer is not None:
            done = [
                Done(one.n, row_of(one.record.id, one.draw), one.record.job.num_outputs)
                for one, say in zip(ended, verdicts, strict=True)
                if say.to == "done"
            ]
            self._packer.take(done)
            return verdicts
        if self._gates is None and all(is_in(one.record, self._target) for one in ended):
            return verdicts  # where they shall be
        return list(self._pool.map(self._deliver, ended, verdicts))

    def tend(self, run: Run) -> None:
        """Packs; removes draws that nobody wants, once their rows say so. What there is more to make of is not
        finished."""
        if run.state != "done" and not self._open:
            self._unfinish(run)
        while self._refused:
            self._remove(self._refused[-1])
            self._refused.pop()
        if self._packer is not None:
            self._packer.tend()

    def complete(self, run: Run) -> None:
        """The last shard, the contact sheet, the report, and `_SUCCESS`, which a cancelled run has not. A sheet that
        cannot be made is no reason to call the run a failure."""
        with self._reopening(run):
            self._complete(run)

    def _complete(self, run: Run) -> None:
        success = run.state != "cancelled"
        shards = self._packer.complete(success=success) if self._packer is not None else 0
        if shards is None:
            return
        run = self._controller.runs.get(run.name)
        self._folder.mend(run.digest, run.planned, self._controller.hold)
        sheet = self._sheet(run)
        try:
            summary = summary_of(run, self._controller.runs, self._client, self._folder)
        except ValueError:
            self._controller.hold()
            if self._controller.runs.get(run.name).complete:
                raise
            return  # somebody asked for some of it again, while it was read
        self._folder.report(summary, sheet)
        self._controller.hold()  # what follows cannot be taken back
        if self._packer is not None:
            self._clean()
        elif self._gates is not None:
            self._folder.write_accepted(self._accepted())
            self._sweep()
        if not success:
            return
        counts = {
            name: getattr(run, name)
            for name in ("planned", "done", "failed", "rejected", "cancelled", "redrawn")
        }
        text = json.dumps({"run": run.name, "manifest": run.digest, **counts, "shards": shards}, indent=2)
        self._controller.hold()
        self._folder.succeed(text.encode())
        self._open = False
        self._controller.hold()

    def restart(self) -> None:
        """As Finisher.restart."""
        self._refused.clear()
        self._open = False
        if self._gates is not None:
            self._gates.restart()
        if self._packer is not None:
            self._packer.restart()

    def close(self) -> None:
        if self._packer is not None:
            self._packer.close()
        self._pool.shutdown()
        self._outputs.close()

    def _unfinish(self, run: Run) -> None:
        if self._folder.succeeded():
            with self._reopening(run):
                self._folder.unfinish()
                self._controller.hold()
        self._open = True

    @contextmanager
    def _reopening(self, run: Run) -> Iterator[None]:
        """Whoever slept as it wrote what comes last, or took it away, may have undone what another one has said since:
        whoever has the run then says it again."""
        try:
            yield
        except LeaseLost:
            self._controller.runs.reopen(run.name)
            raise

    def _deliver(self, one: Ended, verdict: Verdict) -> Verdict:
        if verdict.to == "done" or (verdict.to == "redraw" and f"{one.draw}." in str(verdict.picks)):
            why = deliver(one.record, self._target, self._outputs)
            return verdict if why is None else self._or_again(one, Verdict("again", why=why))
        if is_in(one.record, self._target) and verdict.to not in ("failed", "again"):
            self._refused.append(result_key(one.record.job.output.prefix, one.record.id))
        return verdict

    def _or_again(self, one: Ended, verdict: Verdict) -> Verdict:
        """What is lost is made again, but not for ever."""
        if verdict.to != "again":
            return verdict
        self._controller.hold()  # or it is gone because somebody else needs it no more
        if self._lost[one.record.id] >= MOST_LOST:
            return Verdict("failed", why=verdict.why)
        self._lost[one.record.id] += 1
        log.warning(
            "run %s: what row %d made is lost, and made again: %s", self._spec.name, one.n, verdict.why
        )
        self._outputs.forget(one.record, self._spec)
        return verdict

    def _remove(self, key: str) -> None:
        """A refused draw in the target, by the key of its result; none is there once it is removed."""
        try:
            remove(Made(self._target, key, read_result(self._target, key)))
        except NotFound:
            log.debug("run %s: nothing to remove at %s", self._spec.name, key)
        except Conflict as error:
            log.warning("run %s: a refused draw is not removed: %s", self._spec.name, error)

    def _sheet(self, run: Run) -> bytes | None:
        """Puts the contact sheet; None when there is none. What is in shards already is not read back: an older sheet
        stays when there is less to show than it shows."""
        if not run.spec.sheet or not run.done:
            return None
        pictures = list(islice(self._pictures(), MOST))
        if len(pictures) < min(run.done, MOST) and self._target.head(SHEET) is not None:
            return self._target.get(SHEET)
        try:
            sheet = make_sheet(pictures)
        except SheetFailed as error:
            log.warning("run %s: %s", run.name, error)
            return None
        self._target.put(SHEET, sheet, content_type="image/png")
        return sheet

    def _pictures(self) -> Iterator[tuple[bytes, str]]:
        """What counts of the first rows, in their order, with prompts."""
        for row in islice(self._rows(), 4 * MOST):
            job = row.job
            for job_id, wanted in draws_of(job.id, row.picks).items() if row.letter in "dp" else ():
                made = self._made(job_id, job)
                for output in filter(leads, made.manifest.outputs) if made else ():
                    if made and (wanted is None or output.index in wanted):
                        yield from ((data, job.prompt) for data in _read(made.storage, output.key))

    def _made(self, job_id: str, job: Job) -> Made | None:
        """Where a row's objects are: in the target, or, of shards, where the worker has put them; None: gone."""
        try:
            if self._packer is None:
                key = result_key(job.output.prefix, job_id)
                return Made(self._target, key, read_result(self._target, key))
            (record,) = self._client.statuses([job_id])
            return self._outputs.result(record) if record is not None else None
        except (NotFound, Conflict):
            return None

    def _clean(self) -> None:
        """Single objects that are in shards now, and what attempts without a result have left beside them: in all
        stores that the records know, for whoever packed may have been killed before it came to this."""
        for record in records_of(self._client, self._spec.name, "succeeded"):
            try:
                self._outputs.place(record)
            except Conflict as error:
                log.info("run %s: nothing to clean up: %s", self._spec.name, error)
        prefix = staging(self._spec.name) + "/"
        for storage in self._outputs.stores():
            storage.delete(info.key for info in storage.list(prefix))

    def _rows(self) -> Iterator[Row]:
        """All rows as they stand, some at a time."""
        runs, name, rows = self._controller.runs, self._spec.name, self._folder.rows(0)
        while part := list(islice(rows, _ROWS)):
            letters = runs.rows(name, part[0][0], len(part))
            known = part[: len(letters)]  # more is of somebody who extends the run at this moment
            picks = runs.picks(name, [n for n, _ in known])
            for (n, job), letter, text in zip(known, letters, picks, strict=True):
                yield Row(n, job, letter, text)

    def _sweep(self) -> None:
        """Draws that do not count, of rows that are done or rejected: whoever refused them may have been killed before
        it removed them. By the keys that they have: a list of the target would be one of other runs too."""
        left = (
            result_key(row.job.output.prefix, job_id)
            for row in self._rows()
            for job_id in refused_draws(row.job.id, row.picks, row.letter, self._spec.redraws)
        )
        while part := list(islice(left, _ROWS)):
            list(self._pool.map(self._remove, part))

    def _accepted(self) -> Iterator[str]:
        """A line for each job of which pictures count, for a run of single objects with gates."""
        for row in self._rows():
            for job_id, wanted in draws_of(row.job.id, row.picks).items() if row.letter in "dp" else ():
                outputs = sorted(wanted) if wanted is not None else list(range(row.job.num_outputs))
                yield json.dumps({"row": row.n, "job": job_id, "outputs": outputs})


def _read(storage: Storage, key: str) -> Iterator[bytes]:
    """An object, or nothing: somebody may have taken it away."""
    try:
        yield storage.get(key)
    except NotFound:
        log.warning("the contact sheet lacks %s, which is gone", key)
