"""What the scheduler deals in: entries, their states, decisions. No torch, no clock of its own: `now` is
passed in.

WAITING ─┬─> RUNNING ─┬─> COMPLETED
         │     ^  │   ├─> ABORTED    (cancelled, or its deadline passed)
         │     │  v   └─> ERROR
         │   PREEMPTED  (parked at a step border, latents kept)
         └─> ABORTED, ERROR
What ran or was parked waits again when its ranks have failed: RUNNING, PREEMPTED ─> WAITING.
`Entry.move` is the one place that changes a state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from saggar.engine.request import Request, Room


class Status(Enum):
    """A request's state inside the engine."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    COMPLETED = "completed"
    ABORTED = "aborted"
    ERROR = "error"

    @property
    def ended(self) -> bool:
        """True for the three states that nothing leaves."""
        return self in (Status.COMPLETED, Status.ABORTED, Status.ERROR)


_ENDS = {Status.ABORTED, Status.ERROR}
_ALLOWED: dict[Status, set[Status]] = {
    Status.WAITING: {Status.RUNNING} | _ENDS,
    Status.RUNNING: {Status.WAITING, Status.PREEMPTED, Status.COMPLETED} | _ENDS,
    Status.PREEMPTED: {Status.WAITING, Status.RUNNING} | _ENDS,
    Status.COMPLETED: set(),
    Status.ABORTED: set(),
    Status.ERROR: set(),
}


@dataclass(eq=False)
class Entry:
    """A request in the scheduler's hands. `seq` is its place in the order of arrival; `cost` is rows ×
    branches × tokens, `tokens` the last factor where rows of one key may differ in it. `suspect`: ranks failed
    while it ran, so it runs again alone. `replica`: where it runs or is parked.
    """

    request: Request
    key: str
    seq: int
    arrived: float
    cost: int = 0
    deadline: float | None = None
    status: Status = Status.WAITING
    passed_over: int = 0
    batch_id: str = ""
    batch_size: int = 0
    step: int = 0
    steps: int = 0
    cut: str = ""
    suspect: bool = False
    replica: int | None = None
    tokens: int = 1

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def rows(self) -> int:
        """Rows that the request fills in a batch."""
        return self.request.rows

    @property
    def priority(self) -> int:
        """0 interactive, 1 normal, 2 bulk."""
        return self.request.priority

    def move(self, to: Status) -> None:
        """Change the state. AssertionError for a step that the drawing above does not have."""
        assert to in _ALLOWED[self.status], f"{self.id}: {self.status.value} -> {to.value}"
        self.status = to

    def rewind(self) -> None:
        """What it did is lost, and it waits as it did at first."""
        self.move(Status.WAITING)
        self.batch_id, self.batch_size, self.step, self.steps, self.cut = "", 0, 0, 0, ""
        self.replica = None


@dataclass(frozen=True)
class Decision:
    """What the ranks do next; who ran before and does not stand in `run` keeps its latents.

    `steps` is how many steps may pass before the scheduler is asked again, None for "until somebody ends".
    An empty `run` means: nothing to do before `wake_at` (None: before something arrives).
    """

    run: Sequence[Entry] = ()
    steps: int | None = None
    wake_at: float | None = None


@dataclass
class Announced:
    """Seats announced for requests of one key that are still on their way. Give back with
    `Scheduler.release`.
    """

    key: str
    rows: int
    made_at: float
    closed: bool = field(default=False)


class Scheduler(Protocol):
    """Decides which requests run together. Called under the engine's lock; it owns no thread and no lock."""

    def add(self, entry: Entry) -> None:
        """Take in a waiting entry."""

    def leave(self, entry: Entry, to: Status) -> None:
        """End an entry that waits, runs or is parked."""

    def put_back(self, entry: Entry) -> None:
        """An entry that runs or is parked waits again in its old place: its ranks have failed."""

    def use(self, replicas: Collection[int]) -> None:
        """The replicas that serve now."""

    def schedule(self, now: float, replica: int = 0) -> Decision:
        """The next decision for a replica; entries it names change their state here."""

    def reserve(self, key: str, rows: int, now: float) -> Announced:
        """Announce rows of a key."""

    def release(self, reservation: Announced, rows: int | None = None) -> None:
        """Rows arrived (or, with None, the rest will not come)."""

    def room(self, now: float) -> Room:
        """What it would take now, with the replicas that serve."""

    def counts(self) -> dict[str, int]:
        """Rows and requests waiting and running, and why batches were cut where they were
        (`cut.<reason>`).
        """
