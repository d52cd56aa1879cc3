"""The ledger of runs: how each row of each run stands, one letter a row, and the counts that follow from it.

A run of 100,000 rows takes 100 KB of Redis beside the jobs of its window. One controller at a time holds a run by a
token; what it says later under a lost token changes nothing. Errors of the connection (redis.RedisError) pass through:
every call may be made again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from saggar.jobs.errors import RedisFull, RunChanged, UnknownRun
from saggar.jobs.ledger.ledger import Runner
from saggar.jobs.ledger.parse import rows as reply_rows
from saggar.jobs.ledger.parse import time_of
from saggar.jobs.ledger.script import Argument, Op, Reply
from saggar.jobs.runs.record import Run, RunSpec, RunState
from saggar.jobs.schema import check_id

if TYPE_CHECKING:
    import redis
    from saggar.jobs.settings import JobSettings

T = TypeVar("T")
SCRIPTS = Path(__file__).with_name("scripts")
Letter = Literal[".", "q", "d", "p", "f", "r", "c"]
"""Waiting, in the window, done, done and packed, failed, rejected, cancelled."""
CHUNK = 10_000


def changed_plan(name: str) -> RunChanged:
    """For another manifest under the name of a run."""
    return RunChanged(
        f"run {name} was planned from another manifest (allowed: the same one again, --extend to add what is new, or "
        "another --name)"
    )


class LeaseLost(Exception):
    """Another controller has the run: stop at once, and say nothing more about it."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of a row's job `id`: `to` is an end, "." to queue it again, or "q" when `next` is its next draw,
    number `draw`. `kind` and `message` of a failure; `batch` rows it ran among; `pictures` of `bytes` it made; `picks`
    is what was accepted, None for all of it; `refused` the gates that refused a picture each; `keep` of a done row that
    may be lost yet."""

    n: int
    id: str
    to: Letter
    next: str | None = None
    draw: int = 0
    kind: str | None = None
    message: str = ""
    batch: int | None = None
    bytes: int | None = None
    pictures: int | None = None
    picks: str | None = None
    refused: tuple[str, ...] | None = None
    keep: bool = False

    def stored(self) -> dict[str, object]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in fields.items() if value is not None}


class RunLedger:
    """All runs of one Redis, over a client that answers in text."""

    def __init__(self, client: redis.Redis, settings: JobSettings) -> None:
        self.client = client
        self._settings = settings
        self._runner = Runner(client, settings, SCRIPTS)
        self._lease_ms = round(settings.run_lease_s * 1000)

    # -- for everybody

    def open(self, spec: RunSpec, rows: str = "") -> Literal["created", "same"]:
        """A new run, or one of this name and manifest again, with new settings. `rows`: a letter for each when some
        are done already. Raises RunChanged, QueueFull (Redis has no memory)."""
        answer = self._call("open", spec.name, spec.model_dump_json(), spec.digest, spec.planned, rows)
        if answer == "changed":
            raise changed_plan(spec.name)
        return cast("Literal['created', 'same']", answer)

    def get(self, name: str) -> Run:
        """Raises UnknownRun."""
        return self._run(Op("view", [check_id(name)], partial(_read, name)))

    def list(self, limit: int = 100) -> Sequence[Run]:
        """The newest runs first."""
        names = cast("Sequence[str]", self.client.zrevrange(self._settings.key_prefix + "runs", 0, limit - 1))
        ops = [Op("view", [name], partial(_read, name)) for name in names]
        return [run for run in self._runner.run_many(ops) if isinstance(run, Run)] if ops else []

    def change(self, name: str, to: RunState, why: str = "", *, token: str = "") -> RunState:
        """Pause, resume or cancel; the state that stands, which is another one where that cannot be: `done` is only
        what is complete. `token`: of a controller, which says nothing about a run that another one has. Raises
        UnknownRun, LeaseLost."""
        may_come_from: dict[RunState, tuple[RunState, ...]] = {
            "paused": ("planned", "running"),
            "running": ("planned", "paused"),
            "cancelled": ("planned", "running", "paused"),
            "done": ("running",),
        }
        answer = self._call("change", check_id(name), to, why, token, *may_come_from[to])
        if answer == "unknown":
            raise UnknownRun(name)
        if answer == "lost":
            raise LeaseLost(name)
        return cast("RunState", answer)

    def again(self, name: str, ends: Sequence[Literal["failed", "rejected", "cancelled"]]) -> int:
        """Rows with these ends are made again; how many. Raises UnknownRun."""
        count = cast("int", self._call("again", check_id(name), "".join(end[0] for end in ends)))
        if count < 0:
            raise UnknownRun(name)
        return count

    def reopen(self, name: str) -> bool:
        """A run that is done goes on: there is more to make, or to write. False: it was not done."""
        return self._call("reopen", check_id(name)) == 1

    def drop(self, name: str) -> bool:
        """Forgets the run; False when somebody holds it or it is unknown."""
        return self._call("drop", check_id(name)) == 1

    def rows(self, name: str, first: int, count: int) -> str:
        """Letters of these rows."""
        return cast("str", self.client.getrange(self._key(name, "rows"), first, first + count - 1))

    def letters(self, name: str, numbers: Sequence[int]) -> Sequence[str]:
        """Of these rows, wherever they stand, in one round trip."""
        pipe = self.client.pipeline(transaction=False)
        for n in numbers:
            pipe.getrange(self._key(name, "rows"), n, n)
        return cast("Sequence[str]", pipe.execute())

    def rows_in(self, name: str, letters: str) -> Iterator[int]:
        """Rows that stand in one of these letters, in order."""
        first = 0
        while part := self.rows(name, first, CHUNK):
            yield from (first + i for i, letter in enumerate(part) if letter in letters)
            first += len(part)

    def picks(self, name: str, numbers: Sequence[int]) -> Sequence[str | None]:
        """What was accepted of these rows: "draw.output,..."; None: everything of the first draw."""
        return (
            cast("Sequence[str | None]", self.client.hmget(self._key(name, "picks"), numbers))
            if numbers
            else []
        )

    def all_picks(self, name: str) -> Iterator[tuple[int, str]]:
        """Rows of which not simply everything was accepted, and what was, in no order."""
        for n, text in self.client.hscan_iter(self._key(name, "picks"), count=1000):
            yield int(n), text

    def tallies(self, name: str) -> tuple[dict[int, int], dict[str, int]]:
        """Rows by the size of the batch in which they ran; refused pictures by gate."""
        sizes = cast("dict[str, str]", self.client.hgetall(self._key(name, "sizes")))
        gates = cast("dict[str, str]", self.client.hgetall(self._key(name, "gates")))
        by_size = {int(size): int(rows) for size, rows in sizes.items()}
        return by_size, {gate: int(count) for gate, count in gates.items()}

    def failures(self, name: str) -> tuple[dict[str, int], dict[int, str]]:
        """How many of each kind, and the first of them by row: kind and message."""
        kinds = cast("dict[str, str]", self.client.hgetall(self._key(name, "kinds")))
        wrong = cast("dict[str, str]", self.client.hgetall(self._key(name, "wrong")))
        told = {int(n): text for n, text in wrong.items()}
        return {kind: int(count) for kind, count in kinds.items()}, dict(sorted(told.items()))

    def pace(self, name: str) -> Sequence[tuple[float, int]]:
        """Rows that ended in each ten seconds in which some did: (seconds since the epoch, how many), in order."""
        pace = cast("dict[str, str]", self.client.hgetall(self._key(name, "pace")))
        return sorted((float(slot) * 10, int(count)) for slot, count in pace.items())

    # -- for the controller

    @property
    def lease_s(self) -> float:
        """How long a run is held without a sign of life."""
        return self._settings.run_lease_s

    def claim(self, name: str, token: str, *, force: bool = False) -> Literal["taken", "kept"] | None:
        """Takes or keeps the run: "taken" is one that this token did not have a moment ago, None one that another one
        has. `force`: take it from whoever has it. Raises UnknownRun."""
        answer = self._call("claim", name, token, self._lease_ms, int(force))
        if answer == "unknown":
            raise UnknownRun(name)
        return None if answer == "held" else cast("Literal['taken', 'kept']", answer)

    def keep(self, name: str, token: str) -> bool:
        """Renews a lease that is still this token's."""
        return self._call("keep", name, token, self._lease_ms) == 1

    def hold(self, name: str, token: str) -> None:
        """The same. Raises LeaseLost: whoever was asleep for too long does nothing more."""
        if not self.keep(name, token):
            raise LeaseLost(name)

    def release(self, name: str, token: str) -> None:
        self._call("release", name, token)

    def extend(self, spec: RunSpec, token: str, before: str, more: int) -> None:
        """`more` rows at the end of the manifest `before`, which `spec` names anew. Raises LeaseLost, RunChanged."""
        answer = self._held("extend", spec.name, token, spec.model_dump_json(), before, spec.digest, more)
        if answer == "changed":
            raise RunChanged(f"run {spec.name} was extended by somebody else in the meantime: try again")

    def opened(self, name: str) -> dict[str, tuple[int, int]]:
        """The window: job id -> row and draw."""
        places = cast("dict[str, str]", self.client.hgetall(self._key(name, "open")))
        return {job_id: parse_place(place) for job_id, place in places.items()}

    def mark(self, name: str, token: str, cursor: int, entries: Sequence[tuple[str, int]]) -> None:
        """These rows, under these job ids, are in the window now; the next to queue is `cursor`. Raises LeaseLost."""
        self._held("mark", name, token, cursor, *(part for entry in entries for part in entry))

    def settle(self, name: str, token: str, settled: Sequence[Settled]) -> None:
        """Raises LeaseLost."""
        self._held("settle", name, token, json.dumps([one.stored() for one in settled]))

    def pack(
        self, name: str, token: str, numbers: Sequence[int], to: Literal["p", "."] = "p"
    ) -> Sequence[int]:
        """These done rows are in a shard now; with ".", what they made is gone and is made again. Those of them that
        were done and in no shard: nothing happened to the others. Raises LeaseLost."""
        moved: Sequence[int] = ()
        for first in range(0, len(numbers), 1000):
            answer = self._held("pack", name, token, to, *numbers[first : first + 1000])
            moved = [*moved, *(int(n) for n in cast("Sequence[str]", answer))]
        return moved

    def close(self, name: str, token: str) -> None:
        """Of a cancelled run: what comes last is written, or nobody tries again. Raises LeaseLost."""
        self._held("close", name, token)

    def void(self, name: str) -> int:
        """Of a cancelled run: rows that were never queued are cancelled; how many."""
        return cast("int", self._call("void", name))

    def forget(self, name: str, job_ids: Sequence[str], events: int, *, token: str) -> int:
        """Records of ended jobs go, and all but the last `events` events of the run; how many records. Raises
        LeaseLost."""
        return cast("int", self._held("forget", name, token, events, *job_ids))

    def _key(self, name: str, part: str) -> str:
        return f"{self._settings.key_prefix}runs:{check_id(name)}:{part}"

    def _held(self, script: str, name: str, token: str, *args: Argument) -> Reply:
        answer = self._call(script, name, token, self._lease_ms, *args)
        if answer == "lost":
            raise LeaseLost(name)
        return answer

    def _call(self, script: str, *args: Argument) -> Reply:
        def as_it_is(reply: Reply) -> Reply:
            return reply

        return self._run(Op(script, list(args), as_it_is, RedisFull("runs", self._settings.retry_after_s)))

    def _run(self, op: Op[T]) -> T:
        return self._runner.run(op)


def parse_place(text: str) -> tuple[int, int]:
    """Row and draw."""
    n, _, draw = text.partition(":")
    return int(n), int(draw)


def _read(name: str, reply: Reply) -> Run:
    open_jobs, held, *flat = reply_rows(reply)
    fields = cast("dict[str, str]", dict(zip(flat[::2], flat[1::2], strict=True)))
    if not fields:
        raise UnknownRun(name)

    def number(field: str) -> int:
        return int(fields.get(field, 0))

    def when(field: str) -> datetime | None:
        return time_of(fields[field]) if field in fields else None

    return Run(
        spec=RunSpec.model_validate_json(fields["spec"]),
        state=cast("RunState", fields["state"]),
        digest=fields["digest"],
        planned=number("planned"),
        done=number("done"),
        failed=number("failed"),
        rejected=number("rejected"),
        cancelled=number("cancelled"),
        redrawn=number("redrawn"),
        open=cast("int", open_jobs),
        cursor=number("cursor"),
        held=bool(held),
        closed="closed" in fields,
        why=fields.get("why", ""),
        spent_s=number("spent") / 1e6,
        round_s=(number("spent") - number("resumed")) / 1e6,
        batches=float(fields.get("batches", 0)),
        batched=number("batched"),
        bytes=number("bytes"),
        pictures=number("pictures"),
        created=when("created"),
        ended=when("ended"),
    )
