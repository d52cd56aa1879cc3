"""Checks of a request's inputs, before it is queued in the engine: which kinds, how many, of what form; and blank ones,
for warming up. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from saggar.engine.errors import InvalidRequest
from saggar.engine.media import Clip, Counts, Media, Sound

USUAL_SIDE = 512
"""Pixels of a blank picture whose size nothing says."""
_BLANK_FRAMES = 9
_BLANK_RATE = 16_000
_FORMS = {
    "image": "uint8, H×W×3 or H×W×4",
    "mask": "uint8, H×W",
    "audio": "a Sound: finite float32, samples × channels",
    "video": "a Clip: uint8, frames × H × W × 3",
}


def check_inputs(inputs: Mapping[str, Sequence[Media]], taken: Counts) -> None:
    """InvalidRequest names the kind, or the one among several."""
    allowed = ", ".join(f"{kind} {_count(*counts)}" for kind, counts in taken.items()) or "no inputs"
    for kind, media in inputs.items():
        if not isinstance(media, list | tuple):
            raise InvalidRequest(f"inputs.{kind}", f"{_said(media)} was given", "a list, also of one")
        if media and kind not in taken:
            raise InvalidRequest(f"inputs.{kind}", "is not taken by this task", allowed)
    for kind, (least, most) in taken.items():
        media = inputs.get(kind, ())
        if not least <= len(media) <= most:
            raise InvalidRequest(f"inputs.{kind}", f"{len(media)} were given", _count(least, most))
        for index, one in enumerate(media):
            if not _is(kind, one):
                raise InvalidRequest(f"inputs.{kind}[{index}]", f"{_said(one)} was given", _FORMS[kind])


def blank(taken: Counts, sides: tuple[int, int]) -> dict[str, list[Media]]:
    """As few inputs as a task takes, of this height and width: grey, white masks, a second of silence."""
    picture = np.full((*sides, 3), 128, np.uint8)
    one: dict[str, Media] = {
        "image": picture,
        "mask": np.full(sides, 255, np.uint8),
        "audio": Sound(np.zeros((_BLANK_RATE, 2), np.float32), _BLANK_RATE),
        "video": Clip(np.stack([picture] * _BLANK_FRAMES), 24.0),
    }
    return {kind: [one[kind]] * least for kind, (least, _) in taken.items() if least}


def shapes(inputs: Mapping[str, Sequence[Media]]) -> str:
    """What of the inputs decides the shapes of a model's tensors; equal for equal ones."""
    return ";".join(
        f"{kind}={','.join(_shape(one) for one in media)}" for kind, media in sorted(inputs.items()) if media
    )


def _is(kind: str, one: Media) -> bool:
    if kind == "audio":
        return isinstance(one, Sound) and one.rate > 0 and _is_samples(one.samples)
    if kind == "video":
        return isinstance(one, Clip) and 0 < one.fps < math.inf and _is_pixels(one.frames, 4, (3,))
    if kind == "mask":
        return isinstance(one, np.ndarray) and _is_pixels(one, 2, ())
    return isinstance(one, np.ndarray) and _is_pixels(one, 3, (3, 4))


def _is_pixels(array: np.ndarray, axes: int, channels: tuple[int, ...]) -> bool:
    fits = array.dtype == np.uint8 and array.ndim == axes and array.size > 0
    return fits and (not channels or array.shape[-1] in channels)


def _is_samples(array: np.ndarray) -> bool:
    fits = array.dtype == np.float32 and array.ndim == 2 and array.size > 0
    return fits and bool(np.isfinite(array).all())


def _shape(one: Media) -> str:
    array = one if isinstance(one, np.ndarray) else one.frames if isinstance(one, Clip) else one.samples
    return "x".join(map(str, array.shape))


def _said(one: object) -> str:
    return (
        f"{one.dtype} {'x'.join(map(str, one.shape))}" if isinstance(one, np.ndarray) else type(one).__name__
    )


def _count(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"
