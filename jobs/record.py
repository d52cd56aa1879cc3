"""What became of a job: its state, its times, its result or error.

Producers read these; the ledger alone writes them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from saggar.jobs.schema import Job

State = Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"]
OPEN: tuple[State, ...] = ("queued", "running")
TERMINAL: tuple[State, ...] = ("succeeded", "failed", "cancelled", "expired")
STATES: tuple[State, ...] = OPEN + TERMINAL


class _Frozen(BaseModel):
    # Fields that are not known here come from a newer writer: a record is read all the same.
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


class OutputRef(_Frozen):
    """One finished object. `part` counts the files of an output that is several (frames, layers). Pixels, seconds and
    Hz, where it has them."""

    index: int
    uri: str
    sha256: str
    bytes: int
    content_type: str
    seed: int
    width: int | None = None
    height: int | None = None
    part: int | None = None
    frames: int | None = None
    fps: float | None = None
    duration_s: float | None = None
    sample_rate: int | None = None
    channels: int | None = None


class UnreadText(_Frozen):
    """A text of the job that is longer than the model reads: of its `tokens` tokens the first `read_tokens` count."""

    field: str
    read_tokens: int
    tokens: int


class JobResult(_Frozen):
    """What the winning attempt made. `timings` in seconds by phase. `unread`: texts that were too long; None without
    any."""

    outputs: list[OutputRef]
    manifest: str | None = None  # URI of result.json
    attempt: int
    batch_id: str = ""
    batch_size: int = 1
    timings: dict[str, float] = {}
    unread: tuple[UnreadText, ...] | None = None


class JobError(_Frozen):
    """Why the job failed. `kind` is a short word to count by (invalid, permanent, out_of_memory, ...)."""

    kind: str = Field(min_length=1, max_length=64)
    message: str = Field(max_length=4096)


class Progress(_Frozen):
    step: int
    steps: int


class Times(_Frozen):
    """On Redis's clock. `started` is the last attempt's."""

    submitted: datetime
    started: datetime | None = None
    finished: datetime | None = None


class JobRecord(_Frozen):
    """The ledger's view of a job at one moment. `attempt` 0: never started. `position` is its place in the
    lane, from 0, while it waits and when it was asked for. `suspicions` counts attempts that died while
    executing. `digest` names the spec as it was asked for; `put` counts the messages that have stood for the
    job in its lane, `extras` is what they carry of Celery's (JSON)."""

    id: str
    state: State
    job: Job
    digest: str
    attempt: int = 0
    owner: str | None = None
    cancel_requested: bool = False
    suspicions: int = 0
    dead: bool = False
    progress: Progress | None = None
    result: JobResult | None = None
    error: JobError | None = None
    times: Times
    position: int | None = None
    put: int = 1
    extras: str = ""

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL
