"""Any other text-to-image pipeline of diffusers, called as a whole: request batches only, all parameters shared.

Its parameters are the scalars of its `__call__`, with their defaults. The call runs in a thread that stands still at
each step's callback, so that progress is real and cancels take effect there; a pipeline without a callback is one
step. Rows share a call where the pipeline takes lists of prompts and of generators, else each has its own. Calls never
share a sampler: each has a shallow copy of the pipeline with samplers of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass as checked
from saggar.engine.config import WarmUp
from saggar.engine.errors import InvalidRequest, RowFailed, Unsupported
from saggar.engine.models.base import Family
from saggar.engine.models.diffusers_any.paced import Paced
from saggar.engine.models.diffusers_any.signatures import Argument, call_arguments
from saggar.engine.models.reading import Reading
from saggar.engine.models.state import RequestState, Row
from saggar.engine.request import Request, TextCut

if TYPE_CHECKING:
    from saggar.engine.platform.base import Placement

WHOLE = "whole"
HOOKS = ("callback_on_step_end", "callback")
"""The argument that is called after each step, and what older pipelines have instead."""
_OURS = {
    "batch_size", "callback_steps", "generator", "num_images_per_prompt", "num_videos_per_prompt", "output_type",
    "return_dict",
}  # fmt: skip
_RANGES: Mapping[str, Any] = {
    "height": Field(ge=1, le=8192),
    "width": Field(ge=1, le=8192),
    "num_inference_steps": Field(ge=1, le=1000),
}
_USUAL_SIZE = 1024


@dataclass(frozen=True)
class Made:
    """What a call of the pipeline makes: pictures [rows, H, W, 3] in 0..1, and of each row what was not read."""

    pictures: np.ndarray
    unread: list[dict[str, TextCut]]


@dataclass(frozen=True)
class Seat:
    """The place of an output in a call of the pipeline."""

    call: Paced[Made]
    place: int


Seats = dict[int, Seat]
"""The seats of a request's outputs, by index; those of a call that failed are gone, and the rows start again."""
State = RequestState[np.ndarray, Any, Seats]
Rows = Sequence[Row[np.ndarray, Any, Seats]]


class DiffusersAny(Family[np.ndarray, Any, Seats]):
    """See the module. `family_of` makes the class for a pipeline."""

    name = "diffusers-any"
    step_batching = False
    spreads = False
    pipeline: ClassVar[str]
    arguments: ClassVar[Mapping[str, Argument]]

    def preprocess(self, request: Request) -> Request:
        """A negative prompt is refused where the pipeline takes none."""
        if request.negative_prompt is not None and "negative_prompt" not in self.arguments:
            raise InvalidRequest("negative_prompt", f"{self.pipeline} takes none", "null")
        return request

    def cost(self, request: Request) -> int:
        """Patches of 16×16 pixels of each row and branch, at the usual size where the request leaves it open."""
        height, width = (int(str(request.params.get(side) or _USUAL_SIZE)) for side in ("height", "width"))
        guided = float(str(request.params.get("guidance_scale") or 0)) > 1
        return request.rows * (2 if guided else 1) * -(-height // 16) * -(-width // 16)

    def warmup_request(self, kind: WarmUp) -> Request:
        """Few steps, for a warm-up runs them all."""
        few = {"num_inference_steps": 2} if "num_inference_steps" in self.batch_fields else {}
        return super().warmup_request(replace(kind, params={**few, **kind.params}))

    def load(self, placement: Placement) -> None:
        """The pipeline on the rank's device."""
        from saggar.engine.models.source.loading import load_pipeline

        self._pipe = load_pipeline(self.pipeline, self.checkpoint, placement)
        self._pipe.set_progress_bar_config(disable=True)
        self._placement = placement

    def probe(self) -> dict[str, str]:
        """Tokens of a probe prompt, and the first noise of a seed."""
        from saggar.engine.models.common import probe

        return probe(self._pipe)

    def prepare_encode(self, states: Sequence[State]) -> None:
        """Only the number of steps: encoding is a part of the call, and of its first step."""
        for state in states:
            state.sampler = {}
            state.timesteps = list(range(self._steps(state.params)))

    def branches(self, state: State) -> tuple[str, ...]:
        """Guidance is the pipeline's own affair."""
        return (WHOLE,)

    def predict(self, rows: Rows, branch: str) -> np.ndarray:
        """The calls of these rows make their next step; zeros [rows]. Once it is made, asking again does nothing."""
        self._seat(rows)
        for row in rows:
            with _forgotten_if_it_fails(rows, row):
                _seat_of(row).call.advance(row.state.step_index + 1)
        return np.zeros(len(rows))

    def combine(self, predictions: Mapping[str, np.ndarray], state: State) -> np.ndarray:
        """What `predict` gave."""
        return predictions[WHOLE]

    def step_scheduler(self, state: State, noise: np.ndarray) -> None:
        """The pipeline's own sampler has made the step."""

    def post_decode(self, states: Sequence[State]) -> list[list[np.ndarray]]:
        """The calls run to their end, and each output takes its picture."""
        rows = [Row(state, index) for state in states for index in range(state.request.num_outputs)]
        self._seat(rows)
        pictures: dict[str, list[np.ndarray]] = {state.id: [] for state in states}
        for row in rows:
            with _forgotten_if_it_fails(rows, row):
                seat = _seat_of(row)
                made = seat.call.result()
                pictures[row.state.id].append(self._pixels(made.pictures[seat.place]))
                row.state.unread = made.unread[seat.place]
        return [pictures[state.id] for state in states]

    def join(self, pieces: Sequence[np.ndarray]) -> np.ndarray:
        """np.concatenate."""
        return np.concatenate(list(pieces))

    # -- helpers

    def _steps(self, params: Any) -> int:
        """How often the callback is called, as far as it is known before; a call that ends early skips the rest."""
        steps: int | None = getattr(params, "num_inference_steps", None)
        if steps is None or self._hook is None:
            return 1
        sampler = getattr(self._pipe, "scheduler", None)
        if sampler is None or sampler.config.get("use_dynamic_shifting"):
            return steps
        own = type(sampler).from_config(sampler.config)
        own.set_timesteps(steps)
        return len(own.timesteps)

    @property
    def _hook(self) -> str | None:
        return next((name for name in HOOKS if name in self.arguments), None)

    def _seat(self, rows: Rows) -> None:
        """Give rows that have none a seat, in as few calls as the pipeline can make of them."""
        waiting = [row for row in rows if row.index not in _seats(row)]
        for group in self._groups(waiting):
            call = Paced(_Call(self, group))
            for place, row in enumerate(group):
                _seats(row)[row.index] = Seat(call, place)

    def _groups(self, rows: Rows) -> Iterator[Rows]:
        """Rows that one call can take."""
        taken = self.arguments
        if not (taken["prompt"].takes_list("str") and taken["generator"].takes_list("torch.Generator")):
            yield from ([row] for row in rows)
            return
        lists = "negative_prompt" in taken and taken["negative_prompt"].takes_list("str")
        groups: dict[object, list[Row[np.ndarray, Any, Seats]]] = {}
        for row in rows:
            negative = row.state.request.negative_prompt
            groups.setdefault(negative is None if lists else negative, []).append(row)
        yield from groups.values()

    def _pixels(self, picture: np.ndarray) -> np.ndarray:
        """H×W×3, from 0..1 to what is asked for; rounds as diffusers does."""
        if not np.isfinite(picture).all():
            raise RowFailed("the picture is not finite")
        if self._placement.pixels == "uint8":
            return (picture * 255).round().astype(np.uint8)
        return picture.astype(np.float32)


class _Call:
    """One call of the pipeline for some rows; knows nothing of their states, which may go before it ends."""

    def __init__(self, family: DiffusersAny, rows: Rows) -> None:
        requests = [row.state.request for row in rows]
        self._family = family
        self._seeds = [row.state.request.seed + row.index for row in rows]
        self._prompts = [request.prompt for request in requests]
        self._negatives = [request.negative_prompt for request in requests]
        self._params = asdict(rows[0].state.params)

    def __call__(self, step: Any) -> Made:
        """The whole call; `step` is called after each of the pipeline's steps."""
        import torch

        device = self._family._placement.device
        if device is not None and device.type != "cpu":
            torch.accelerator.set_device_index(device.index or 0)  # a thread begins with the first one
        pipe = own_pipeline(self._family._pipe)
        reading = Reading(_own_tokenizers(pipe))
        with torch.inference_mode(), reading.noting():
            output = pipe(**self._arguments(step))
        pictures = getattr(output, "images", None)
        if (
            not isinstance(pictures, np.ndarray)
            or pictures.shape[0] != len(self._seeds)
            or pictures.ndim != 4
        ):
            raise RowFailed(f"{self._family.pipeline} gives no pictures, and only pictures are served")
        return Made(pictures, [self._unread(reading, row) for row in range(len(self._seeds))])

    def _unread(self, reading: Reading, row: int) -> dict[str, TextCut]:
        texts = {"prompt": self._prompts[row], "negative_prompt": self._negatives[row]}
        cuts = {field: reading.cut(text) for field, text in texts.items() if text}
        return {field: cut for field, cut in cuts.items() if cut is not None}

    def _arguments(self, step: Any) -> dict[str, Any]:
        import torch

        taken = self._family.arguments
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in self._seeds]
        lists: dict[str, list[Any]] = {"prompt": self._prompts, "negative_prompt": self._negatives}
        found: dict[str, Any] = {
            **self._params,
            "output_type": "np",
            "generator": generators if taken["generator"].takes_list("torch.Generator") else generators[0],
        }
        for name, texts in lists.items():
            if texts[0] is not None:
                found[name] = texts if taken[name].takes_list("str") else texts[0]
        ours = {"num_images_per_prompt": 1, "return_dict": True, "callback_steps": 1, "output_type": "np"}
        found |= {name: value for name, value in ours.items() if name in taken}
        if self._family._hook == "callback_on_step_end":
            found["callback_on_step_end"] = lambda _pipe, _index, _timestep, kept: (step(), kept)[1]
        elif self._family._hook:
            found[self._family._hook] = lambda *_: step()
        return found


@cache
def family_of(class_name: str) -> type[DiffusersAny] | None:
    """The family of a pipeline of diffusers; None: there is none of this name. Unsupported: it makes no pictures of
    prompts alone.
    """
    arguments = call_arguments(class_name)
    if arguments is None:
        return None
    for name, why in (
        ("prompt", "it takes no prompt"),
        ("generator", "it takes no generator: no seed would count"),
    ):
        if name not in arguments:
            raise Unsupported(f"{class_name} cannot be called as a whole here: {why}")
    if needed := [name for name, one in arguments.items() if one.required and name != "prompt"]:
        raise Unsupported(f"{class_name} cannot be called as a whole here: it needs {', '.join(needed)} too")
    scalars = [one for one in arguments.values() if _is_param(one)]
    defaults = {one.name: one.default for one in scalars}
    fields = {**defaults, "__annotations__": {one.name: _annotation(one) for one in scalars}}
    params = checked(frozen=True)(type(f"{class_name}Params", (), fields))
    own = {
        "__doc__": f"{class_name}, called as a whole.",
        "__module__": __name__,
        "Params": params,
        "batch_fields": tuple(one.name for one in scalars),
        "tells_steps": any(hook in arguments for hook in HOOKS),
        "pipeline": class_name,
        "arguments": arguments,
    }
    return cast("type[DiffusersAny]", type(f"Any{class_name}", (DiffusersAny,), own))


def _is_param(one: Argument) -> bool:
    return one.scalar is not None and one.name not in _OURS and "prompt" not in one.name


def _annotation(one: Argument) -> Any:
    kind: Any = {"int": int, "float": float, "bool": bool, "str": str}[str(one.scalar)]
    if one.name in _RANGES:
        kind = Annotated[kind, _RANGES[one.name]]
    return kind | None if one.nullable else kind


def _seats(row: Row[np.ndarray, Any, Seats]) -> Seats:
    assert row.state.sampler is not None
    return row.state.sampler


def _seat_of(row: Row[np.ndarray, Any, Seats]) -> Seat:
    return _seats(row)[row.index]


@contextmanager
def _forgotten_if_it_fails(rows: Rows, row: Row[np.ndarray, Any, Seats]) -> Iterator[None]:
    """When the call of `row` fails, all rows that shared it lose their seats: tried again, they begin anew."""
    call = _seat_of(row).call
    try:
        yield
    except BaseException:
        for other in rows:
            seat = _seats(other).get(other.index)
            if seat is not None and seat.call is call:
                del _seats(other)[other.index]
        raise


def _own_tokenizers(pipe: Any) -> dict[str, Any]:
    """Copies in their places, of a pipeline that is nobody else's: calls are watched each for itself."""
    own = {name: copy.copy(part) for name, part in vars(pipe).items() if "tokenizer" in name and part}
    vars(pipe).update(own)
    return own


def own_pipeline(pipe: Any) -> Any:
    """A shallow copy with samplers of its own, and so are the pipelines inside: all other parts are shared."""
    from diffusers import DiffusionPipeline

    own = copy.copy(pipe)
    for name, part in list(vars(pipe).items()):
        if isinstance(part, DiffusionPipeline):
            vars(own)[name] = own_pipeline(part)
        elif hasattr(part, "set_timesteps"):
            vars(own)[name] = type(part).from_config(part.config)
    return own
