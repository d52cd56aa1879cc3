"""Finished files looked at again: as arrays, to be compared; and as one picture, to be seen or judged."""

from __future__ import annotations

import io
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from saggar.engine.media import Media, Sound
from saggar.workers.inputs.bad import BadInput
from saggar.workers.inputs.clips import ALLOWED, Video, rgb, video_stream
from saggar.workers.inputs.container import FORMS, opened
from saggar.workers.inputs.policy import Limits
from saggar.workers.inputs.sniff import kind_of
from saggar.workers.inputs.sounds import SoundFile

Still = NDArray[np.uint8]
STRIP = 4
"""Frames of a video that are shown side by side."""
SOUNDS = ("WAV", "FLAC")

_OURS = Limits(bytes=1 << 40, pixels=1 << 40, frames=1 << 30, seconds=1e9)  # what was made here is trusted
_WAVE = (96, 384)
_INK, _PAPER = (63, 111, 163), (250, 249, 246)


def media_of(data: bytes) -> Media:
    """A file of ours decoded: a picture with its transparency, if it has some. Raises ValueError and OSError."""
    file = io.BytesIO(data)
    kind = kind_of(file)
    try:
        if kind in FORMS:
            return Video(file, _OURS).read()
        if kind in SOUNDS:
            return SoundFile(file, _OURS).read()
    except BadInput as error:
        raise ValueError(error.message) from error
    with Image.open(file) as image:
        return np.asarray(image.convert("RGBA" if "A" in image.getbands() else "RGB"))


def still_of(data: bytes) -> Still:
    """A file of ours as one picture, H×W×3: of a video four frames side by side, of a sound its wave.

    Raises ValueError, and OSError (PIL.UnidentifiedImageError) for what is none of them.
    """
    kind = kind_of(io.BytesIO(data))
    if kind in FORMS:
        return _strip(data)
    if kind in SOUNDS:
        media = media_of(data)
        assert isinstance(media, Sound)
        return _wave(media)
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def _strip(data: bytes) -> Still:
    """Frames from the first to the last; only those are kept in memory."""
    try:
        with opened(io.BytesIO(data), ALLOWED) as container:
            count = sum(packet.size > 0 for packet in container.demux(video_stream(container)))
        wanted = np.unique(np.linspace(0, max(0, count - 1), STRIP).round().astype(int)).tolist()
        with opened(io.BytesIO(data), ALLOWED) as container:
            frames = islice(container.decode(video_stream(container)), count)
            shown = [rgb(frame) for index, frame in enumerate(frames) if index in wanted]
    except BadInput as error:
        raise ValueError(error.message) from error
    return np.concatenate(shown, axis=1)


def _wave(sound: Sound) -> Still:
    """How loud it is, from left to right."""
    height, width = _WAVE
    loud = np.abs(sound.samples).max(axis=1)
    borders = np.linspace(0, len(loud), width + 1).astype(int)
    tops = [loud[a : max(b, a + 1)].max(initial=0) for a, b in pairwise(borders)]
    rows = np.abs(np.linspace(1, -1, height))[:, None] <= np.maximum(tops, 1 / height)[None]
    return np.where(rows[..., None], _INK, _PAPER).astype(np.uint8)
