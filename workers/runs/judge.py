"""The gates of a run: which pictures of a row's draws count, and whether it is drawn again.

What was accepted is kept with the row in the run's ledger, as "draw.output=fingerprint,...": a draw that is judged
again after a crash is held against the same pictures as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from PIL import UnidentifiedImageError
from saggar.jobs.runs import Ended, RunLedger, RunSpec, Verdict
from saggar.jobs.runs.rows import draw_id
from saggar.storage.errors import Conflict, NotFound
from saggar.workers.runs.gates import Candidate, GateError, parse_gates
from saggar.workers.runs.outputs import Made, Outputs, leads


@dataclass(frozen=True)
class Pick:
    """An accepted output of a row: the draw that made it, its number there, and what the gates remember of it."""

    draw: int
    index: int
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.draw}.{self.index}={self.mark}"

    @classmethod
    def parse(cls, text: str) -> list[Pick]:
        """Of a row: as the ledger keeps them."""
        found = []
        for part in filter(None, text.split(",")):
            place, _, mark = part.partition("=")
            draw, _, index = place.partition(".")
            found.append(cls(int(draw), int(index), mark))
        return found


class RowGates:
    """One run's. The order of judging is part of the result; one thread uses it."""

    def __init__(self, spec: RunSpec, runs: RunLedger) -> None:
        """Raises ConfigError for gates that there are not."""
        self._spec, self._runs = spec, runs
        self.restart()

    def restart(self) -> None:
        """Somebody else has had the run: what was accepted is read anew."""
        self._gates = parse_gates(self._spec.gates)
        self._restored = False

    def judge(self, ended: Sequence[Ended], outputs: Outputs) -> Sequence[Verdict]:
        """The verdict "again" says what is gone, or other than it was. Raises StorageUnavailable and StorageRefused."""
        self._restore()
        again = [one.n for one in ended if one.draw]
        before = dict(zip(again, self._runs.picks(self._spec.name, again), strict=True))
        return [self._judge(one, before.get(one.n) or "", outputs) for one in ended]

    def _restore(self) -> None:
        """After a start: the pictures that were accepted before it."""
        if self._restored:
            return
        for n, text in self._runs.all_picks(self._spec.name):
            for pick in Pick.parse(text):
                if pick.mark:
                    self._gates.restore(f"{n}.{pick.draw}.{pick.index}", pick.mark)
        self._restored = True

    def _judge(self, one: Ended, before: str, outputs: Outputs) -> Verdict:
        try:
            picks, refused = self._picks(one, outputs.result(one.record))
        except (NotFound, Conflict) as error:
            return Verdict("again", why=f"its result cannot be judged: {error}")
        except (UnidentifiedImageError, ValueError) as error:
            return Verdict("failed", why=f"its result cannot be judged: {error}")
        except GateError as error:
            return Verdict("failed", why=str(error))
        job = one.record.job
        kept = [*(pick for pick in Pick.parse(before) if pick.draw < one.draw), *picks]
        kept = kept[: self._spec.accept or job.num_outputs]
        text = ",".join(map(str, kept))
        size = _bytes(one, {pick.index for pick in kept if pick.draw == one.draw})
        if len(kept) == (self._spec.accept or job.num_outputs):
            return Verdict("done", picks=text, bytes=size, refused=refused)
        if one.draw < self._spec.redraws:
            return Verdict("redraw", picks=text, bytes=size, refused=refused)
        why = f"{len(kept)} of {self._spec.accept or job.num_outputs} accepted in {one.draw + 1} draws"
        return Verdict("rejected", picks="", why=why, refused=refused)

    def _picks(self, one: Ended, made: Made) -> tuple[list[Pick], tuple[str, ...]]:
        """The accepted outputs of a draw, and the gate that refused each of the others."""
        picks, refused = [], []
        for output in filter(leads, made.manifest.outputs):  # of several files the first is judged
            data = made.storage.get(output.key)
            key = f"{one.n}.{one.draw}.{output.index}"
            judgement = self._gates.judge(Candidate.of_file(key, data, one.record.job.prompt))
            if judgement.rejected_by is None:
                picks.append(Pick(one.draw, output.index, judgement.fingerprint or ""))
            else:
                refused.append(judgement.rejected_by.name)
        return picks, tuple(refused)


Draws = dict[str, set[int] | None]
"""Job ids of the draws that count for a row, with the outputs that do; None: all of them."""


def _bytes(one: Ended, accepted: Set[int]) -> int:
    """Of these outputs."""
    result = one.record.result
    return sum(output.bytes for output in result.outputs if output.index in accepted) if result else 0


def draws_of(row_id: str, picks: str | None) -> Draws:
    """What counts of a row, by what was accepted of it."""
    if picks is None:
        return {row_id: None}
    found: Draws = {}
    for pick in Pick.parse(picks):
        numbers = found.setdefault(draw_id(row_id, pick.draw), set())
        assert numbers is not None
        numbers.add(pick.index)
    return found


def refused_draws(row_id: str, picks: str | None, letter: str, redraws: int) -> Iterator[str]:
    """Job ids of the draws of a row that do not count, where it is done or rejected: of all that it may have cost. The
    last draw of one that is done counts, or there would have been another."""
    counted = draws_of(row_id, picks) if letter == "d" else {}
    last = {"d": max((pick.draw for pick in Pick.parse(picks or "")), default=0), "r": redraws}.get(
        letter, -1
    )
    drawn = (draw_id(row_id, draw) for draw in range(last + 1))
    return (job_id for job_id in drawn if job_id not in counted)
