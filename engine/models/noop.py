"""A family without a model: for tests and measurements of everything around one. numpy only.

Its picture has one colour, made of prompt and seed, so that a mix-up is seen; of the mean colour of its inputs, where
it has some. It can wait in each step and fail on request in each verb. Its siblings make videos and sounds alike.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, cast

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from saggar.engine.media import Clip, Counts, Media, Sound
from saggar.engine.models.base import Family, branched
from saggar.engine.models.registry import serves
from saggar.engine.models.state import RequestState, Row
from saggar.engine.request import Request, TextCut

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
    reads: Annotated[int, Field(ge=0, description="words that it reads of a text; 0: all")] = 0
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
    tasks: tuple[str, ...] = ("t2i", "i2i", "layers")
    inputs: ClassVar[Mapping[str, Counts]] = {
        "i2i": {"image": (1, 4), "mask": (0, 1)},
        "layers": {"image": (1, 1)},
    }
    alpha = frozenset({"layers"})
    batch_fields: ClassVar[tuple[str, ...]] = ("height", "width", "key")
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
            given = input_colour(request.inputs)
            state.latents = np.stack(
                [
                    colour(request.prompt, request.seed + i) if given is None else given
                    for i in range(request.num_outputs)
                ]
            )
            state.timesteps = [float(step) for step in range(state.params.steps, 0, -1)]
            state.unread = _unread(state)

    def branches(self, state: State) -> tuple[str, ...]:
        """A second branch with guidance above 1."""
        return branched(state.params.guidance_scale > 1)

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

    def media_per_output(self, request: Request) -> int:
        """Two layers of an output."""
        return 2 if request.task == "layers" else 1

    def post_decode(self, states: Sequence[State]) -> list[list[Media]]:
        """Pictures of one colour; as layers the colour and, behind it, black that lets all through."""
        return [list(self._media(state)) for state in states]

    def preview(self, state: State) -> np.ndarray:
        """One pixel."""
        assert state.latents is not None
        return state.latents[:1, None].astype(np.uint8)

    def join(self, pieces: Sequence[np.ndarray]) -> np.ndarray:
        """np.concatenate."""
        return np.concatenate(list(pieces))

    def _media(self, state: State) -> Iterator[Media]:
        for picture in self._pictures(state):
            if state.request.task != "layers":
                yield picture
            else:
                yield np.concatenate(
                    [picture, np.full_like(picture[..., :1], 1.0 if self._floats else 255)], 2
                )
                yield np.zeros((*picture.shape[:2], 4), picture.dtype)

    def _pictures(self, state: State) -> list[np.ndarray]:
        _fail(state, "decode")
        assert state.latents is not None
        shape = (state.params.height, state.params.width, 3)
        return [np.broadcast_to(self._pixel(row), shape).copy() for row in state.latents]

    def _pixel(self, row: np.ndarray) -> np.ndarray:
        return row / np.float32(255) if self._floats else row.astype(np.uint8)

    @property
    def _floats(self) -> bool:
        return self.pixels == "float32"


@serves("NoopStreamPipeline")
class NoopStream(Noop):
    """Delivers its picture so far each `chunk_every` steps."""

    name = "noop-stream"
    streaming = True

    def chunk_due(self, state: State) -> bool:
        """At each such border."""
        return state.params.chunk_every > 0 and state.step_index % state.params.chunk_every == 0


@dataclass(frozen=True)
class NoopVideoParams(NoopParams):
    """`sound_hz`: the pitch of a sine that it has for a sound; 0: none."""

    frames: Annotated[int, Field(ge=1, le=1000)] = 9
    fps: Annotated[float, Field(gt=0, le=240)] = 8.0
    sound_hz: Annotated[float, Field(ge=0, le=20_000)] = 0.0


@serves("NoopVideoPipeline")
class NoopVideo(Noop):
    """Videos: frame k has the colour and k brighter. Of a video that it is given it keeps the sound."""

    name = "noop-video"
    Params = NoopVideoParams
    tasks = ("t2v", "i2v", "v2v")
    inputs: ClassVar[Mapping[str, Counts]] = {"i2v": {"image": (1, 2)}, "v2v": {"video": (1, 1)}}
    alpha = frozenset()
    medium = "video"
    batch_fields = ("height", "width", "key", "frames")

    def _media(self, state: State) -> Iterator[Media]:
        params = cast(NoopVideoParams, state.params)
        given = [clip.sound for clip in state.request.inputs.get("video", ()) if isinstance(clip, Clip)]
        sound = given[0] if given else None
        if params.sound_hz and not given:
            sound = _sine(params.sound_hz, params.frames / params.fps)
        for picture in self._pictures(state):
            one = 1 / 255 if self._floats else 1
            frames = np.stack(
                [np.minimum(picture, 255 * one - k * one) + k * one for k in range(params.frames)]
            )
            yield Clip(frames.astype(picture.dtype), params.fps, sound)


@dataclass(frozen=True)
class NoopAudioParams(NoopParams):
    """`seconds` of a sine."""

    seconds: Annotated[float, Field(gt=0, le=600)] = 1.0


@serves("NoopAudioPipeline")
class NoopAudio(Noop):
    """Sounds: a sine whose pitch follows from the colour, or the sound that it is given."""

    name = "noop-audio"
    Params = NoopAudioParams
    tasks = ("t2a", "a2a")
    inputs: ClassVar[Mapping[str, Counts]] = {"a2a": {"audio": (1, 1)}}
    alpha = frozenset()
    medium = "audio"
    batch_fields = ("key",)

    def _media(self, state: State) -> Iterator[Media]:
        _fail(state, "decode")
        assert state.latents is not None
        params = cast(NoopAudioParams, state.params)
        for row in state.latents:
            yield from state.request.inputs.get("audio", ()) or [_sine(200 + float(row[0]), params.seconds)]


def input_colour(inputs: Mapping[str, Sequence[Media]]) -> np.ndarray | None:
    """The mean colour of all pictures and frames, where the mask is, as whole numbers; None without any."""
    frames = [
        one.frames if isinstance(one, Clip) else one
        for kind in ("image", "video")
        for one in inputs.get(kind, ())
    ]
    masks = inputs.get("mask", ())
    means = []
    for one in frames:
        assert isinstance(one, np.ndarray)
        seen = one[..., :3].reshape(-1, 3)
        if masks and isinstance(masks[0], np.ndarray) and masks[0].size == len(seen) and masks[0].any():
            seen = seen[masks[0].reshape(-1) > 127]
        means.append(seen.mean(axis=0, dtype=np.float64))
    return np.round(np.stack(means).mean(axis=0)).astype(np.float32) if means else None


def _sine(pitch: float, seconds: float, rate: int = 16_000) -> Sound:
    """Two channels, the right one half as loud."""
    left = 0.5 * np.sin(2 * np.pi * pitch * np.arange(max(1, round(seconds * rate))) / rate)
    return Sound(np.stack([left, left / 2], axis=1).astype(np.float32), rate)


def colour(prompt: str, seed: int) -> np.ndarray:
    """The colour of an output: three whole numbers 0..255 as float32."""
    digest = hashlib.blake2b(f"{seed}:{prompt}".encode(), digest_size=3).digest()
    return np.frombuffer(digest, np.uint8).astype(np.float32)


def _unread(state: State) -> dict[str, TextCut]:
    request, reads = state.request, state.params.reads
    texts = {"prompt": request.prompt, "negative_prompt": request.negative_prompt or ""}
    words = {field: len(text.split()) for field, text in texts.items()}
    return {field: TextCut(reads, count) for field, count in words.items() if 0 < reads < count}


def _fail(state: State, verb: str) -> None:
    if state.params.fail_at == verb:
        raise ValueError(state.params.fail_text)
