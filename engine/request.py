"""What goes into the engine and what comes out: frozen data classes without torch.

Who fills what: the caller a `Request`; the engine `EngineEvent`, `Output`, `Room`; the family `ModelInfo`.
Shapes: pictures are H×W×3; the arrays of an Output stand in the order of their output index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np

ParamValue: TypeAlias = bool | int | float | str | list[int] | list[float] | list[str] | None
JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
JsonSchema: TypeAlias = dict[str, JsonValue]

INTERACTIVE, NORMAL, BULK = 0, 1, 2
SEED_MAX = 2**63 - 1
"""Largest seed that any output of a request may reach; output i uses `seed + i`."""


@dataclass(frozen=True)
class Request:
    """One wish: `num_outputs` pictures of one prompt.

    `params` are the family's own fields, still unchecked; `Engine.validate` returns a copy with all of
    them filled in. `negative_prompt` None means none, "" is a negative prompt. `deadline_s` counts from
    the submit. `preview_every` asks for a coarse picture each so many steps (0: none).
    """

    id: str
    prompt: str
    seed: int = 0
    task: str = "t2i"
    negative_prompt: str | None = None
    params: Mapping[str, ParamValue] = field(default_factory=dict)
    num_outputs: int = 1
    inputs: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)
    priority: int = BULK
    deadline_s: float | None = None
    preview_every: int = 0

    @property
    def rows(self) -> int:
        """Rows of a batch that this request fills: one an output."""
        return self.num_outputs


@dataclass(frozen=True)
class Output:
    """A finished request. `arrays[i]` was drawn from `seeds[i]`; uint8 H×W×3, or float32 in 0..1 if
    configured.
    """

    request_id: str
    arrays: list[np.ndarray]
    seeds: list[int]
    batch_id: str
    batch_size: int
    steps: int
    timings: dict[str, float]
    numerics: str


EventKind = Literal["started", "step", "preview", "chunk", "output", "error"]


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """One line of a request's story; `output` or `error` is the last one, exactly once.

    A `preview` has a coarse picture, a `chunk` the arrays of one piece of a streamed output. `cut` says
    why the batch held no more rows when it began; `error` is the text of an `error` event.
    """

    kind: EventKind
    request_id: str
    step: int = 0
    steps: int = 0
    batch_id: str = ""
    batch_size: int = 0
    cut: str = ""
    error: str = ""
    preview: np.ndarray | None = None
    arrays: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class ModelInfo:
    """What a loaded model takes and promises; JSON throughout (`to_dict`), so that it can be published.

    `params_schema` is a flat JSON Schema object; `batch_fields` are the params that rows of one batch
    must share.
    """

    model: str
    family: str
    class_name: str
    tasks: tuple[str, ...]
    params_schema: JsonSchema
    batch_fields: tuple[str, ...]
    max_batch: int
    limits: dict[str, int]
    revision: str
    numerics: str

    def to_dict(self) -> dict[str, JsonValue]:
        """Plain JSON values; tuples become lists."""
        plain = asdict(self)
        plain["tasks"], plain["batch_fields"] = list(self.tasks), list(self.batch_fields)
        return plain


@dataclass(frozen=True)
class Room:
    """What the engine would take now, for whoever fetches work.

    `seats`: rows, the next batch included. `open_key`: the batch key that still has room, if one does,
    and `room` its free rows.
    """

    seats: int
    open_key: str | None
    room: int
