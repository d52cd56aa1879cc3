"""A family without a model: for tests and measurements of everything around one. numpy only.

Its picture has one colour, made of prompt and seed, so that a mix-up is seen. It can wait in each step
and fail on request in each verb.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from saggar.engine.models.base import Family
from saggar.engine.models.registry import serves
from saggar.engine.models.state import RequestState, Row
from saggar.engine.request import Request

if TYPE_CHECKING:
    from saggar.engine.platform.base import Placement

Size = Annotated[int, Field(ge=1, le=8192)]


@dataclass(frozen=True)
class NoopParams:
    """`sleep_s` is the time of one forward, however many rows; `fail_at` names the verb that raises."""

    height: Size = 64
    width: Size = 64
    steps: Annotated[int, Field(ge=1, le=100_000)] = 4
    guidance_scale: Annotated[float, Field(ge=0, le=100)] = 0.0
    sleep_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    key: Annotated[str, Field(description="any text; requests with another one never share a batch")] = ""
    fail_at: Literal["", "encode", "predict", "step", "decode"] = ""
    fail_text: str = "asked to fail"
    memory_rows: Annotated[
        int, Field(ge=0, description="more rows in a forward run out of memory; 0: never")
    ] = 0
    nan_at: Annotated[int, Field(ge=0, description="the step that makes its latents NaN; 0: none")] = 0
    chunk_every: Annotated[
        int, Field(ge=0, description="steps of one piece, for NoopStreamPipeline; 0: none")
    ] = 0


State = RequestState[np.ndarray, NoopParams, None]


@serves("NoopPipeline")
class Noop(Family[np.ndarray, NoopParams, None]):
    """Latents are one colour a row, [outputs, 3] float32; a step adds to them what it is told and leaves no
    trace.
    """

    name = "noop"
    Params = NoopParams
    batch_fields = ("height", "width", "key")
    uses_torch = False
    spreads = False

    def cost(self, request: Request) -> int:
        """One token a 16×16 patch; a second branch with guidance."""
        height, width = int(str(request.params["height"])), int(str(request.params["width"]))
        branches = 2 if float(str(request.params["guidance_scale"])) > 1 else 1
        return request.rows * branches * (-(-height // 16) * -(-width // 16))

    def load(self, placement: Placement) -> None:
        """There is nothing to load."""
        self.pixels = placement.pixels

    def probe(self) -> dict[str, str]:
        """A colour."""
        return {"noise": str(colour("probe", 0).tolist())}

    def prepare_encode(self, states: Sequence[State]) -> None:
        """The colour of each output, from prompt and seed."""
        for state in states:
            _fail(state, "encode")
            request = state.request
            state.latents = np.stack(
                [colour(request.prompt, request.seed + i) for i in range(request.num_outputs)]
            )
            state.timesteps = [float(step) for step in range(state.params.steps, 0, -1)]

    def branches(self, state: State) -> tuple[str, ...]:
        """A second branch with guidance above 1."""
        return ("cond", "uncond") if state.params.guidance_scale > 1 else ("cond",)

    def predict(self, rows: Sequence[Row[np.ndarray, NoopParams, None]], branch: str) -> np.ndarray:
        """Zeros [rows, 3], after the longest wait that a row asks for."""
        for row in rows:
            _fail(row.state, "predict")
        limits = [row.state.params.memory_rows for row in rows if row.state.params.memory_rows]
        if limits and len(rows) > min(limits):
            raise MemoryError(f"{len(rows)} rows, and there is memory for {min(limits)}")
        wait = max(row.state.params.sleep_s for row in rows)
        if wait > 0:
            time.sleep(wait)
        return np.zeros((len(rows), 3), np.float32)

    def combine(self, predictions: Mapping[str, np.ndarray], state: State) -> np.ndarray:
        """The conditional prediction."""
        return predictions["cond"]

    def step_scheduler(self, state: State, noise: np.ndarray) -> None:
        """Adds the prediction."""
        _fail(state, "step")
        assert state.latents is not None
        state.latents = state.latents + noise
        if state.params.nan_at == state.step_index + 1:
            state.latents = state.latents * np.nan

    def finite(self, state: State) -> object:
        """At once."""
        assert state.latents is not None
        return bool(np.isfinite(state.latents).all())

    def post_decode(self, states: Sequence[State]) -> list[list[np.ndarray]]:
        """Pictures of one colour."""
        return [self._pictures(state) for state in states]

    def preview(self, state: State) -> np.ndarray:
        """One pixel."""
        assert state.latents is not None
        return state.latents[:1, None].astype(np.uint8)

    def join(self, pieces: Sequence[np.ndarray]) -> np.ndarray:
        """np.concatenate."""
        return np.concatenate(list(pieces))

    def _pictures(self, state: State) -> list[np.ndarray]:
        _fail(state, "decode")
        assert state.latents is not None
        shape = (state.params.height, state.params.width, 3)
        if self.pixels == "float32":
            return [np.broadcast_to(row / np.float32(255), shape).copy() for row in state.latents]
        return [np.broadcast_to(row.astype(np.uint8), shape).copy() for row in state.latents]


@serves("NoopStreamPipeline")
class NoopStream(Noop):
    """Delivers its picture so far each `chunk_every` steps."""

    name = "noop-stream"
    streaming = True

    def chunk_due(self, state: State) -> bool:
        """At each such border."""
        return state.params.chunk_every > 0 and state.step_index % state.params.chunk_every == 0


def colour(prompt: str, seed: int) -> np.ndarray:
    """The colour of an output: three whole numbers 0..255 as float32."""
    digest = hashlib.blake2b(f"{seed}:{prompt}".encode(), digest_size=3).digest()
    return np.frombuffer(digest, np.uint8).astype(np.float32)


def _fail(state: State, verb: str) -> None:
    if state.params.fail_at == verb:
        raise ValueError(state.params.fail_text)
