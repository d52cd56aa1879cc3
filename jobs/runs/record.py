"""What a run is and how it stands. Producers read these; the run's ledger alone writes them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from saggar.jobs.schema import JobId

RunState = Literal["planned", "running", "paused", "cancelled", "done"]
OutputFormat = Literal["objects", "webdataset", "parquet"]
WINDOW = 2_000
"""Jobs of a run that may be open at once: enough for full batches of many keys, little for Redis to hold."""


class RunSpec(BaseModel):
    """What a run shall do, whoever controls it. `target`: the storage URL of its output; `digest` names its manifest;
    `prefix` stands in front of its jobs' keys; `accept`: pictures wanted of a row, 0 for all that it asks for;
    `redraws`: further draws that a row may cost, each `seed_stride` seeds on (0: as many as it has outputs). Sizes in
    bytes, times in seconds."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    name: JobId
    target: str
    model: str
    digest: str
    planned: int = Field(ge=0)
    prefix: str = ""
    detached: bool = False
    window: Annotated[int, Field(ge=1, le=100_000)] = WINDOW
    max_failures: Annotated[int, Field(ge=1, le=10**12)] | None = None
    time_budget_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    format: OutputFormat = "objects"
    shard_count: Annotated[int, Field(ge=1, le=10**12)] | None = None
    shard_bytes: Annotated[int, Field(ge=1)] | None = None
    gates: tuple[str, ...] = ()
    accept: Annotated[int, Field(ge=0, le=1024)] = 0
    redraws: Annotated[int, Field(ge=0, le=1000)] = 8
    seed_stride: Annotated[int, Field(ge=0)] = 0
    sheet: bool = True


@dataclass(frozen=True, slots=True)
class Run:
    """A run at one moment. done + failed + rejected + cancelled = planned once it has ended; before, `open` rows are
    in the window and the rest waits. `redrawn` counts draws that were not accepted; `cursor` is the next row to queue.
    Times in seconds, on Redis's clock: `spent_s` under a controller, `round_s` of that since it was last resumed.
    `batches` is how many batches its rows took, `batched` how many rows that is; `pictures` that count, of `bytes`
    bytes; what was lost and made again counts once. `closed`: it was cancelled, and what comes last is written or
    cannot be."""

    spec: RunSpec
    state: RunState
    digest: str
    planned: int
    done: int = 0
    failed: int = 0
    rejected: int = 0
    cancelled: int = 0
    redrawn: int = 0
    open: int = 0
    cursor: int = 0
    held: bool = False
    closed: bool = False
    why: str = ""
    spent_s: float = 0.0
    round_s: float = 0.0
    batches: float = 0.0
    batched: int = 0
    bytes: int = 0
    pictures: int = 0
    created: datetime | None = None
    ended: datetime | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def settled(self) -> int:
        """Rows that have come to their end."""
        return self.done + self.failed + self.rejected + self.cancelled

    @property
    def waiting(self) -> int:
        """Rows that are not in the window yet."""
        return self.planned - self.settled - self.open

    @property
    def complete(self) -> bool:
        """Every row has come to its end."""
        return self.settled == self.planned and self.open == 0

    @property
    def mean_batch(self) -> float:
        """Rows of a batch; 0 when nothing ran."""
        return self.batched / self.batches if self.batches else 0.0

    @property
    def rate(self) -> float:
        """Rows a second while somebody controlled it."""
        return self.batched / self.spent_s if self.spent_s > 0 else 0.0
