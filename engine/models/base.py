"""The contract of a model family and the default way to make one step of many rows.

A family is built from a checkpoint's configuration alone; `load` brings the weights. Until then it
answers what needs none: schema, limits, batch key, cost. That half imports no torch, so that the engine's
process stays free of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, cast

from pydantic import ValidationError
from saggar.engine.batch_key import canonical_key, with_sizes
from saggar.engine.config import WarmUp
from saggar.engine.errors import InvalidRequest
from saggar.engine.media import Counts, Media, Medium
from saggar.engine.models.inputs import USUAL_SIDE, blank, check_inputs, shapes
from saggar.engine.models.shared_fields import LIMITS, check_common, in_plain_words
from saggar.engine.models.source.checkpoint import Checkpoint
from saggar.engine.models.state import P, RequestState, Row, S, T
from saggar.engine.parallel.cfg import Alone, Spread
from saggar.engine.parallel.plans import SequencePlan
from saggar.engine.params import Narrowing, check_params, default_of, schema_of, shown
from saggar.engine.request import JsonSchema, JsonValue, ModelInfo, ParamValue, Request

if TYPE_CHECKING:
    import numpy as np
    import torch
    from saggar.engine.platform.base import Placement

_A = TypeVar("_A")


class Family(ABC, Generic[T, P, S]):
    """T: array type, P: the parameters' data class, S: the sampler's class."""

    name: ClassVar[str]
    Params: ClassVar[type[Any]]
    tasks: tuple[str, ...] = ("t2i",)
    """A checkpoint may serve fewer than its class."""
    inputs: ClassVar[Mapping[str, Counts]] = {}
    """For each task that takes files: how many of each kind, at least and at most."""
    medium: ClassVar[Medium] = "image"
    """What it makes."""
    alpha: ClassVar[frozenset[str]] = frozenset()
    """Tasks that take pictures with their transparency, H×W×4; all others get H×W×3."""
    batch_fields: ClassVar[tuple[str, ...]]
    uses_torch: ClassVar[bool] = True
    sequence_plan: SequencePlan | None = None
    """How ranks share one sequence; without it they cannot. A checkpoint may have none of its class's."""
    masks: ClassVar[Mapping[str, Literal["none", "keys", "any"]]] = {}
    """What masks the attention sites of a role get, where they get any."""
    spreads: ClassVar[bool] = True
    """Ranks can share its steps."""
    graphs: ClassVar[bool] = True
    """Its forward can be recorded as a CUDA graph: nothing in it is read back from the GPU."""
    step_batching: ClassVar[bool] = True
    """Requests may join and leave between its steps; without it, asking for step batches is an error at start."""
    tells_steps: ClassVar[bool] = True
    """It stands still between its steps: progress is told and a cancel takes effect there."""
    streaming: ClassVar[bool] = False
    """It delivers pieces before the end, at the borders that `chunk_due` names; the engine then batches by steps."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.schema: JsonSchema = schema_of(self.Params, *self.narrowings(), settings=checkpoint.narrowing)
        self.limits: dict[str, int] = {**LIMITS, **checkpoint.limits}
        self.counters: dict[str, int] = {}
        self.spread: Spread[T] = Alone()

    # -- pure: needs no weights

    def narrowing(self) -> Narrowing:
        """Schema words that this checkpoint's configuration decides: default size, grid."""
        return {}

    def narrowings(self) -> tuple[Narrowing, ...]:
        """All of them in order: before the family's own those that a base has for its families."""
        return (self.narrowing(),)

    def validate(self, request: Request) -> Request:
        """The request with all parameters filled in. InvalidRequest names the field."""
        if request.task not in self.tasks:
            raise InvalidRequest(
                "task", f"{shown(request.task)} is not a task of this model", ", ".join(self.tasks)
            )
        check_common(request, self.limits)
        check_inputs(request.inputs, self.inputs_of(request.task))
        request = in_plain_words(request)
        params = check_params(request.params, self.schema, request.task)
        self.params_of(replace(request, params=params))
        negative = (
            self.checkpoint.negative_prompt if request.negative_prompt is None else request.negative_prompt
        )
        return self.preprocess(replace(request, params=params, negative_prompt=negative))

    def preprocess(self, request: Request) -> Request:
        """Hook: a checked request as the ranks shall see it. InvalidRequest refuses it."""
        return request

    def inputs_of(self, task: str) -> Counts:
        """Hook: the files that a task of this checkpoint takes, by kind."""
        return self.inputs.get(task, {})

    def media_per_output(self, request: Request) -> int:
        """Hook: how many media one output of a validated request is: more than one for layers."""
        return 1

    def fits_inputs(self, task: str) -> bool:
        """Hook: a task brings inputs of any size to that of the request, so that rows may be given unlike ones."""
        return False

    def batch_key(self, request: Request) -> str:
        """What rows must share for their whole life, the sizes of their inputs too unless they are fitted. The request
        must be validated.
        """
        key = canonical_key(request.task, request.params, self.batch_fields)
        return key if self.fits_inputs(request.task) else with_sizes(key, shapes(request.inputs))

    @abstractmethod
    def cost(self, request: Request) -> int:
        """Rows × branches × tokens of one step of a validated request."""

    def row_tokens(self, request: Request) -> int:
        """The tokens of one row in `cost`, where rows of one key may differ in them: a forward is padded to its
        longest row.
        """
        return 1

    def info(self, model: str, max_batch: int, numerics: str = "auto") -> ModelInfo:
        """What this checkpoint serves."""
        return ModelInfo(
            model=model,
            family=self.name,
            class_name=self.checkpoint.class_name,
            tasks=self.tasks,
            params_schema=self.schema,
            batch_fields=self.batch_fields,
            max_batch=max_batch,
            limits=self.limits,
            revision=self.checkpoint.revision,
            numerics=numerics,
            medium=self.medium,
            alpha_tasks=tuple(task for task in self.tasks if task in self.alpha),
            task_inputs={task: found for task in self.tasks if (found := self.inputs_of(task))},
        )

    def params_of(self, request: Request) -> P:
        """Hook: the parameters as the verbs see them, where some follow from others or from the inputs. The request's
        are complete.
        """
        return self._build_params(request.params)

    def _build_params(self, params: Mapping[str, ParamValue]) -> P:
        try:
            built: P = self.Params(**params)
        except ValidationError as error:  # the schema was narrowed to more than the data class bears
            first = error.errors()[0]
            raise InvalidRequest(f"params.{first['loc'][0]}", first["msg"]) from error
        return built

    def new_state(self, request: Request) -> RequestState[T, P, S]:
        """The empty state of a validated request."""
        return RequestState(request, self.params_of(request))

    def warmup_request(self, kind: WarmUp) -> Request:
        """The request that warms this kind up, of the first task. InvalidRequest: the model does not take it."""
        task = self.tasks[0]
        inputs = blank(self.inputs_of(task), self._sides(kind.params, task))
        return self.validate(
            Request(
                "warm-up", "warm-up", 0, task, kind.negative_prompt, kind.params, kind.rows, inputs=inputs
            )
        )

    def _sides(self, params: Mapping[str, ParamValue], task: str) -> tuple[int, int]:
        """Height and width, as far as they are known."""
        words = cast("dict[str, dict[str, JsonValue]]", self.schema["properties"])
        found = [params.get(side, default_of(words.get(side, {}), task)) for side in ("height", "width")]
        high, wide = (side if isinstance(side, int) else USUAL_SIDE for side in found)
        return high, wide

    # -- verbs, in a rank

    @abstractmethod
    def load(self, placement: Placement) -> None:
        """Bring the weights to the device. LoadError says what is wrong with the checkpoint."""

    @abstractmethod
    def prepare_encode(self, states: Sequence[RequestState[T, P, S]]) -> None:
        """Fill conditioning, first latents, timesteps and sampler of new requests."""

    @abstractmethod
    def branches(self, state: RequestState[T, P, S]) -> tuple[str, ...]:
        """The branches that this request needs in its present step."""

    @abstractmethod
    def predict(self, rows: Sequence[Row[T, P, S]], branch: str) -> T:
        """One forward for these rows of one branch, [rows, ...]; changes no state."""

    @abstractmethod
    def combine(self, predictions: Mapping[str, T], state: RequestState[T, P, S]) -> T:
        """The guidance formula of one request: branch -> [outputs, ...] to [outputs, ...]."""

    @abstractmethod
    def step_scheduler(self, state: RequestState[T, P, S], noise: T) -> None:
        """The sampler's step; the caller advances `step_index`."""

    @abstractmethod
    def post_decode(self, states: Sequence[RequestState[T, P, S]]) -> Sequence[Sequence[Media]]:
        """Finished latents to media: for each request those of its first output, then of the next."""

    def denoisers(self) -> Mapping[str, torch.nn.Module]:
        """The loaded modules whose attention and sharing are set from outside, by name."""
        return {}

    def decoders(self) -> Mapping[str, torch.nn.Module]:
        """The loaded modules that make media of latents, by name."""
        return {}

    def probe(self) -> dict[str, str]:
        """What two ranks that loaded the same checkpoint must find alike, by name: digests of tokens, of noise."""
        return {}

    def finite(self, state: RequestState[T, P, S]) -> object:
        """Whether the latents are finite: anything that `bool` takes, read only when the request is decoded."""
        return True

    def chunk_due(self, state: RequestState[T, P, S]) -> bool:
        """Whether a piece can be decoded at this border; `post_decode` then gives the media of that piece."""
        return False

    def preview(self, state: RequestState[T, P, S]) -> np.ndarray | None:
        """A coarse uint8 picture of the first output from its latents, never by the VAE; None where there is
        none.
        """
        return None

    def step_key(self, state: RequestState[T, P, S]) -> str:
        """What rows must share in this step."""
        return ""

    @abstractmethod
    def join(self, pieces: Sequence[T]) -> T:
        """Concatenate along the first axis."""

    # -- the default composition

    def denoise_step(self, states: Sequence[RequestState[T, P, S]], max_rows: int) -> dict[str, T]:
        """The combined prediction of each request for its present step, by id; changes no state.

        Groups by step key, then by branch, and packs only rows that need the branch, at most `max_rows` a
        forward. Ranks that share branches each predict a run of the rows, and hear of all.
        """
        predictions: dict[str, dict[str, T]] = {state.id: {} for state in states}
        for group in grouped(states, self.step_key):
            branches = _in_order(self.branches(state) for state in group)
            work = [(name, state) for name in branches for state in group if name in self.branches(state)]
            whole, start = self._predict_all(work, max_rows), 0
            for name, state in work:
                end = start + state.request.num_outputs
                predictions[state.id][name], start = whole[start:end], end  # type: ignore[index]
        return {state.id: self.combine(predictions[state.id], state) for state in states}

    def _predict_all(self, work: Sequence[tuple[str, RequestState[T, P, S]]], max_rows: int) -> T:
        """One prediction a row of the work, in its order."""
        rows = [(name, Row(state, i)) for name, state in work for i in range(state.request.num_outputs)]
        mine = rows[self.spread.mine(len(rows))]
        parts: list[T] = []
        for name in _in_order((name,) for name, _ in mine):
            parts += self._predict_branch([row for branch, row in mine if branch == name], name, max_rows)
        shapes = (max_rows, *((name, _shape(row.state.latents)) for name, row in rows))
        return self.spread.gather(self._joined(parts) if parts else None, len(rows), self._joined, shapes)

    def _predict_branch(self, rows: Sequence[Row[T, P, S]], branch: str, max_rows: int) -> Iterator[T]:
        for start in range(0, len(rows), max_rows):
            chunk = rows[start : start + max_rows]
            yield self.predict(chunk, branch)
            self.count(f"forwards.{branch}", 1)
            self.count(f"rows.{branch}", len(chunk))

    def _joined(self, parts: Sequence[T]) -> T:
        return parts[0] if len(parts) == 1 else self.join(parts)

    def count(self, name: str, by: int) -> None:
        """Add to a running total that stats show."""
        self.counters[name] = self.counters.get(name, 0) + by


def branched(guided: bool) -> tuple[str, ...]:
    """The usual branches: a second one, without the prompt, where there is guidance."""
    return ("cond", "uncond") if guided else ("cond",)


def grouped(states: Sequence[_A], key: Callable[[_A], Hashable]) -> list[list[_A]]:
    """Those of one key together, keys and members in the order of first sight."""
    groups: dict[Hashable, list[_A]] = {}
    for state in states:
        groups.setdefault(key(state), []).append(state)
    return list(groups.values())


def _in_order(names: Iterator[tuple[str, ...]]) -> list[str]:
    """Each branch once, in the order of first need."""
    return list(dict.fromkeys(name for some in names for name in some))


def _shape(latents: object) -> tuple[int, ...]:
    """Of one row."""
    return tuple(getattr(latents, "shape", ()))[1:]
