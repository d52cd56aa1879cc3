"""What the engine sends to the ranks and what comes back. No torch; everything here is pickled between
processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from saggar.engine.config import EngineConfig
from saggar.engine.errors import EngineError
from saggar.engine.media import Media
from saggar.engine.request import Request, TextCut

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Plan:
    """One turn of the ranks, in this order: drop, encode `admit`, step the rows of `run`, decode what is
    finished.

    `steps`: at most so many steps (None: no limit); a turn also ends when a row finishes, fails or is
    cancelled. `decode_rows`: rows decoded in this turn while others still have steps to make; at least
    one request is. Requests that a rank holds and `run` does not name stay parked, their latents
    untouched.
    """

    id: int
    run: tuple[str, ...] = ()
    admit: tuple[Request, ...] = ()
    drop: tuple[str, ...] = ()
    steps: int | None = None
    decode_rows: int = 8


RowStatus = Literal["running", "decoding", "done", "failed", "dropped"]


@dataclass(frozen=True)
class RowReport:
    """Where one request stands after a turn. `media`, `timings` and `unread` come with `done`, `error` with `failed`.

    `previews` and `chunks` are those since the last report, each with its step.
    """

    id: str
    status: RowStatus
    step: int
    steps: int
    media: Sequence[Media] = ()
    previews: Sequence[tuple[int, np.ndarray]] = ()
    chunks: Sequence[tuple[int, Sequence[Media]]] = ()
    error: EngineError | None = None
    timings: dict[str, float] = field(default_factory=dict)
    unread: Mapping[str, TextCut] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The end of a turn: a line for each request of `run`, and the rank's running totals."""

    plan_id: int
    rows: tuple[RowReport, ...]
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """What a rank needs to begin. `slot` is its place among the ranks of all replicas; `row_limits` are the most rows
    of one forward by batch key, where an earlier group has learned that memory holds no more.
    """

    config: EngineConfig
    rank: int
    slot: int
    row_limits: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Ready:
    """A rank has loaded and warmed up. `numerics` names what its results depend on.

    `agreed` is what the ranks of a group have in common, by name; so must they after a restart.
    """

    rank: int
    pid: int
    numerics: str
    revision: str
    agreed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stepped:
    """Between two steps of a plan: where its requests stand."""

    rows: tuple[RowReport, ...]


@dataclass(frozen=True)
class Cancel:
    """End these requests of a plan before their next step; it means nothing once the plan is over."""

    plan_id: int
    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """Call a method of the rank's extension between two plans; with `rank` of that one alone."""

    method: str
    args: tuple[object, ...] = ()
    rank: int | None = None


@dataclass(frozen=True)
class Reply:
    """What a call returned, or what it raised."""

    value: object = None
    error: EngineError | None = None


@dataclass(frozen=True)
class Shutdown:
    """Finish the turn and end the process."""


@dataclass(frozen=True)
class Failed:
    """The rank could not start, or cannot go on; its process ends."""

    error: EngineError
