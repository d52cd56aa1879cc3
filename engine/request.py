"""What goes into the engine and what comes out: frozen data classes without torch.

Who fills what: the caller a `Request`; the engine `EngineEvent`, `Output`, `Room`; the family `ModelInfo`.
Shapes are those of media.py; the media of an Output stand in the order of their output index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeVar

from saggar.engine.media import Clip, Counts, Media, Medium, Sound

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
    """One wish: `num_outputs` pictures, videos or sounds of one prompt.

    `params` are the family's own fields, still unchecked; `Engine.validate` returns a copy with all of
    them filled in. `negative_prompt` None means none, "" is a negative prompt. `deadline_s` counts from
    the submit. `inputs`: what it starts from, by kind. `preview_every` asks for a coarse picture each so many
    steps (0: none). `suspect`: ranks have died of it before, so it runs alone and ends with the next that dies.
    """

    id: str
    prompt: str
    seed: int = 0
    task: str = "t2i"
    negative_prompt: str | None = None
    params: Mapping[str, ParamValue] = field(default_factory=dict)
    num_outputs: int = 1
    inputs: Mapping[str, Sequence[Media]] = field(default_factory=dict)
    priority: int = BULK
    deadline_s: float | None = None
    preview_every: int = 0
    suspect: bool = False

    @property
    def rows(self) -> int:
        """Rows of a batch that this request fills: one an output."""
        return self.num_outputs


class TextCut(NamedTuple):
    """Of a text that is longer than the model reads: of its `tokens` tokens the first `read_tokens` count."""

    read_tokens: int
    tokens: int


@dataclass(frozen=True)
class Output:
    """A finished request. `media[i]` was drawn from `seeds[i]`; a model that makes several of one output (layers)
    repeats its seed. `unread`: its texts that are too long for the model, by the request's field ("prompt",
    "negative_prompt").
    """

    request_id: str
    media: list[Media]
    seeds: list[int]
    batch_id: str
    batch_size: int
    steps: int
    timings: dict[str, float]
    numerics: str
    unread: Mapping[str, TextCut] = field(default_factory=dict)

    @property
    def images(self) -> list[np.ndarray]:
        """The media of a model that makes pictures. TypeError: it makes something else."""
        return _all([one for one in self.media if not isinstance(one, Clip | Sound)], self.media, "picture")

    @property
    def clips(self) -> list[Clip]:
        """The media of a model that makes videos. TypeError: it makes something else."""
        return _all([one for one in self.media if isinstance(one, Clip)], self.media, "video")

    @property
    def sounds(self) -> list[Sound]:
        """The media of a model that makes sounds. TypeError: it makes something else."""
        return _all([one for one in self.media if isinstance(one, Sound)], self.media, "sound")


EventKind = Literal["started", "step", "preview", "chunk", "output", "error"]


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """One line of a request's story; `output` or `error` is the last one, exactly once.

    A `preview` has a coarse picture, a `chunk` the media of one piece of a streamed output. `cut` says
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
    media: tuple[Media, ...] = ()


@dataclass(frozen=True)
class ModelInfo:
    """What a loaded model takes and promises; JSON throughout (`to_dict`), so that it can be published.

    `params_schema` is a flat JSON Schema object; `batch_fields` are the params that rows of one batch
    must share. `task_inputs` says for each task that takes files how many of each kind, at least and at most;
    `medium` is what it makes; `alpha_tasks` are those that take pictures with transparency.
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
    medium: Medium = "image"
    task_inputs: Mapping[str, Counts] = field(default_factory=dict)
    alpha_tasks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, JsonValue]:
        """Plain JSON values; tuples become lists."""
        plain = asdict(self)
        plain["tasks"], plain["batch_fields"] = list(self.tasks), list(self.batch_fields)
        plain["alpha_tasks"] = list(self.alpha_tasks)
        plain["task_inputs"] = {
            task: {kind: list(counts) for kind, counts in kinds.items()}
            for task, kinds in self.task_inputs.items()
        }
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


_M = TypeVar("_M")


def _all(found: list[_M], media: Sequence[Media], kind: str) -> list[_M]:
    if len(found) < len(media):
        raise TypeError(f"not every one of these {len(media)} media is a {kind}")
    return found
