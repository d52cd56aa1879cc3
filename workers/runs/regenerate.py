"""Making samples again and holding them against what is stored.

An engine promises equal pixels only within a numerics class (dtype / platform / attention) and, in floats, only for the
same company in the batch: sums are taken in another order otherwise. So the class decides how close is close enough:

| class | equal enough |
|---|---|
| `exact` and any that is not listed | every value is equal |
| `float32/...` | no value differs by more than 2 of 255 |
| `bfloat16/...`, `float16/...` | PSNR of at least 30 dB |

Lossy files are compared after the new picture was encoded in the same way. Another class or revision is not compared.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue
from saggar.engine.engine import Engine
from saggar.engine.errors import EngineError
from saggar.engine.handle import Handle
from saggar.engine.media import Clip, Media, Sound
from saggar.jobs.errors import SaggarError
from saggar.storage.base import Storage
from saggar.storage.errors import NotFound
from saggar.storage.shard_formats import shard_format
from saggar.workers.encode_media import encode_media
from saggar.workers.runs.findings import Pick
from saggar.workers.runs.samples import Recorded, recorded_of, sample_of
from saggar.workers.stills import media_of
from saggar.workers.translate import to_request

Status = Literal["bit-equal", "within", "differs", "incomparable"]
FLOAT32_LEVELS = 2
HALF_PSNR_DB = 30.0

_HALF = ("bfloat16", "float16")
Values = NDArray[np.uint8] | NDArray[np.float32]


@dataclass(frozen=True)
class Remade:
    """A sample that was made again. `levels`: the largest difference of 255; `psnr` in dB, None for equal pictures."""

    name: str
    status: Status
    numerics: str
    levels: int | None = None
    psnr: float | None = None
    why: str = ""

    @property
    def good(self) -> bool:
        return self.status in ("bit-equal", "within")

    def to_json(self) -> dict[str, JsonValue]:
        return {
            "name": self.name,
            "status": self.status,
            "numerics": self.numerics,
            "levels": self.levels,
            "psnr": self.psnr,
            "why": self.why,
        }


def recorded(storage: Storage, picks: Sequence[Pick]) -> Iterator[Recorded | Remade]:
    """What is recorded of each pick, or why it cannot be made again."""
    for pick in picks:
        name = f"{pick.base}/{pick.row}" if pick.row else pick.output.key if pick.output else pick.base
        try:
            yield _of_row(storage, pick) if pick.row else _of_output(storage, pick)
        except (ValueError, NotFound, SaggarError) as error:
            yield Remade(name, "incomparable", "", why=f"{type(error).__name__}: {error}")


def remake(engine: Engine, wanted: Sequence[Recorded]) -> Iterator[Remade]:
    """Makes them again, in batches as the engine likes; results in the order given."""
    handles: list[tuple[Recorded, Handle | None, str]] = []
    for number, one in enumerate(wanted):
        if (why := _unlike(engine, one)) is not None:
            handles.append((one, None, why))
            continue
        job = one.job.model_copy(
            update={"id": f"verify-{number}", "seed": one.seed, "num_outputs": 1, "priority": "bulk"}
        )
        try:
            handles.append((one, engine.submit(to_request(job)), ""))
        except EngineError as error:
            handles.append((one, None, f"{type(error).__name__}: {error}"))
    for one, handle, why in handles:
        if handle is None:
            yield Remade(one.name, "incomparable", one.numerics, why=why)
        elif (failed := handle.wait()) is not None:
            yield Remade(one.name, "differs", one.numerics, why=f"{type(failed).__name__}: {failed}")
        else:
            yield _compared(one, handle.result().media[0])


def compare(numerics: str, stored: Values, again: Values) -> tuple[Status, int, float | None]:
    """Two arrays on a scale of 0 to 255, by the class that made the first: status, largest difference, PSNR in dB.

    Raises ValueError when their sizes differ.
    """
    if stored.shape != again.shape:
        raise ValueError(f"{_size(again)}, not {_size(stored)}")
    wide = np.int16 if stored.dtype == again.dtype == np.uint8 else np.float32
    difference = np.abs(stored.astype(wide) - again.astype(wide))
    levels = math.ceil(difference.max())
    if levels == 0:
        return "bit-equal", 0, None
    psnr = float(10 * np.log10(255**2 / np.mean(np.square(difference, dtype=np.float64))))
    dtype = numerics.partition("/")[0]
    close = (dtype == "float32" and levels <= FLOAT32_LEVELS) or (dtype in _HALF and psnr >= HALF_PSNR_DB)
    return ("within" if close else "differs"), levels, round(psnr, 2)


def _compared(one: Recorded, media: Media) -> Remade:
    try:
        # As it would have been stored: what a lossy format loses is lost here too.
        again = next(encode_media(media, one.job.output.format, one.job.output.quality, {}))
        pairs = zip(_values(one.picture), _values(again.data), strict=True)
        status, levels, psnr = max((compare(one.numerics, *pair) for pair in pairs), key=_badness)
    except ValueError as error:
        return Remade(one.name, "differs", one.numerics, why=str(error))
    return Remade(one.name, status, one.numerics, levels, psnr)


def _badness(found: tuple[Status, int, float | None]) -> tuple[int, int]:
    return ("bit-equal", "within", "differs").index(found[0]), found[1]


def _values(data: bytes) -> list[Values]:
    """What a file holds on a scale of 0 to 255: pixels, or frames and sound."""
    media = media_of(data)
    if isinstance(media, Clip):
        return [media.frames, *([] if media.sound is None else _values_of(media.sound))]
    return _values_of(media) if isinstance(media, Sound) else [media]


def _values_of(sound: Sound) -> list[Values]:
    return [(sound.samples + 1) * np.float32(127.5)]


def _size(array: Values) -> str:
    """As people say it."""
    return f"{array.shape[1]}×{array.shape[0]} pixels" if array.ndim == 3 else "×".join(map(str, array.shape))


def _unlike(engine: Engine, one: Recorded) -> str | None:
    """Why this engine cannot be expected to make the same picture, or None."""
    if one.numerics != engine.info.numerics:
        return f"made as {one.numerics or 'unknown'}, this engine computes as {engine.info.numerics}"
    if one.revision != engine.info.revision:
        return "made by another revision of the model's weights"
    if one.job.inputs.model_dump(exclude_defaults=True) or one.job.loras:
        return "made from inputs or with adapters, which are not kept with it"
    return None


def _of_output(storage: Storage, pick: Pick) -> Recorded:
    assert pick.output is not None
    if pick.output.sidecar is None:
        raise ValueError("it has no sidecar")
    # Keys in a manifest are those of the worker's store, which may have had its root elsewhere.
    here = "/".join([pick.base, *pick.output.key.rsplit("/", 2)[1:]])
    side = "/".join([pick.base, *pick.output.sidecar.key.rsplit("/", 2)[1:]])
    content = cast("dict[str, JsonValue]", json.loads(storage.get(side)))
    return recorded_of(sample_of(here, storage.get(here), "png", content))


def _of_row(storage: Storage, pick: Pick) -> Recorded:
    data = storage.get(pick.base)
    for sample in shard_format(pick.format).read(io.BytesIO(data)):
        if sample.key == pick.row:
            return recorded_of(sample)
    raise NotFound(f"{pick.base} no longer holds {pick.row}")
