"""What a run came to, as its report tells it: from the ledger of runs, the plan and the model's card."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice

from pydantic import JsonValue
from saggar.jobs.cards import Cards
from saggar.jobs.client import JobClient
from saggar.jobs.runs import Run, RunLedger
from saggar.workers.runs.folder import RunFolder
from saggar.workers.runs.report import Failure, RunSummary
from saggar.workers.versions import versions

_EXAMPLES = 20


def summary_of(run: Run, runs: RunLedger, client: JobClient, folder: RunFolder) -> RunSummary:
    """Of a run all of whose rows are settled."""
    sizes, gates = runs.tallies(run.name)
    kinds, wrong = runs.failures(run.name)
    card = Cards(runs.client, client.settings).get(run.spec.model)
    began = run.created or datetime.now(UTC)
    pace = runs.pace(run.name)
    ended = max(run.ended or began, began + timedelta(seconds=run.spent_s))
    failures = {kind: count for kind, count in kinds.items() if kind != "rejected"}
    long = folder.unread.gather()
    told = [(n, text) for n, text in wrong.items() if not text.startswith("rejected: ")]
    return RunSummary(
        run=run.name,
        model=run.spec.model,
        revision=card.revision if card else "",
        numerics=card.numerics if card else "",
        output=run.spec.target,
        began=began,
        ended=ended,
        planned=run.planned,
        done=run.done,
        failed=run.failed,
        rejected=run.rejected,
        cancelled=run.cancelled,
        pictures=run.pictures,
        drawn=run.pictures + sum(gates.values()),
        size=run.bytes,
        failures=failures,
        rejections=gates,
        batches={size: max(1, round(rows / size)) for size, rows in sizes.items()},
        timeline=_timeline(pace, began.timestamp()),
        parameters=_parameters(folder),
        versions=versions(),
        unread=len(long),
        unread_examples=long[:_EXAMPLES],
        examples=[Failure(f"row {n}", *text.split(": ", 1)) for n, text in islice(told, _EXAMPLES)],
    )


def _timeline(pace: Sequence[tuple[float, int]], began: float) -> list[tuple[float, int]]:
    found, total = [], 0
    for slot, count in pace:
        total += count
        found.append((max(0.1, slot + 10 - began), total))
    return found


def _parameters(folder: RunFolder) -> dict[str, JsonValue]:
    """Those of the first row, of which every other has its own: the report says what the run was about."""
    first = next(iter(folder.rows(0)), None)
    if first is None:
        return {}
    params = first[1].params
    return {name: list(value) if isinstance(value, list) else value for name, value in params.items()}
