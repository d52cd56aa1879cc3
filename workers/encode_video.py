"""Videos to files: MP4 (H.264, AAC) and WebM (VP9, Opus) that carry their parameters as their comment.

Frames are RGB in full range; files are 4:2:0 in limited range by BT.709, and say so. One frame is converted at a time.
The same clip and parameters give the same bytes, under the same FFmpeg: a video is encoded by one thread (with four,
one clip in thousands came out a few bytes longer on a busy machine), and WebM's random identifiers are left out.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from saggar.engine.media import Clip, Sound
from saggar.workers.encode import Encoded, Facts, Parameters

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import OutputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

DEFAULT_QUALITY = 80

_THREADS = "1"
_BT709 = 1  # of matrix, primaries and transfer alike, in FFmpeg's numbering
_LIMITED = 1
_LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1"}
_PIECE_S = 1.0  # of sound, encoded at a time


@dataclass(frozen=True)
class _Form:
    """A container and its codecs. `crf`: the rate factor of quality 100, and what one less of quality adds."""

    content_type: str
    video: str
    audio: str
    crf: tuple[float, float]
    codec: Mapping[str, str]
    container: Mapping[str, str]
    rates: tuple[int, ...]


_AAC_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000)
_FORMS: Mapping[str, _Form] = {
    "mp4": _Form(
        "video/mp4",
        "libx264",
        "aac",
        (10, 0.41),
        {"preset": "medium"},
        {"movflags": "+faststart", "fflags": "+bitexact"},
        _AAC_RATES,
    ),
    "webm": _Form(
        "video/webm",
        "libvpx-vp9",
        "libopus",
        (23, 0.4),
        {"deadline": "good", "cpu-used": "4", "row-mt": "1", "b": "0"},
        {"fflags": "+bitexact"},
        (48000,),
    ),
}


def encode_video(clip: Clip, format: str, quality: int | None, parameters: Parameters) -> Encoded:
    """One file; `quality` is 1 to 100, 80 if none is given (a rate factor of 18 for H.264, 31 for VP9).

    Raises ValueError for frames of odd height or width, which 4:2:0 cannot hold, and for other arrays and formats.
    """
    if format not in _FORMS:
        raise ValueError(f"{format!r} is no file of a video; there are {', '.join(_FORMS)}")
    _check(clip, quality)
    form = _FORMS[format]
    with tempfile.TemporaryDirectory(prefix="saggar-encode-") as folder:
        path = Path(folder) / f"video.{format}"  # faststart writes a file's end to its beginning
        _write(path, clip, format, form, quality or DEFAULT_QUALITY, parameters)
        data = path.read_bytes()
    frames, height, width = clip.frames.shape[:3]
    sound = clip.sound
    facts = Facts(
        width,
        height,
        frames,
        clip.fps,
        frames / clip.fps,
        sound.rate if sound else None,
        sound.samples.shape[1] if sound else None,
    )
    return Encoded.of(data, form.content_type, format, facts)


def _check(clip: Clip, quality: int | None) -> None:
    frames = clip.frames
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or 0 in frames.shape:
        raise ValueError(f"a video is uint8, frames × height × width × 3, not {frames.dtype} {frames.shape}")
    if frames.shape[1] % 2 or frames.shape[2] % 2:
        raise ValueError(f"{frames.shape[2]} x {frames.shape[1]}: a video has an even width and height")
    if not 0 < clip.fps <= 1000:
        raise ValueError(f"{clip.fps} frames a second: a video has more than 0 and at most 1000")
    if clip.sound is not None and clip.sound.samples.shape[1] not in _LAYOUTS:
        raise ValueError(f"a video's sound has {', '.join(map(str, _LAYOUTS))} channels")
    if clip.sound is not None and not np.isfinite(clip.sound.samples).all():
        raise ValueError("a sound's samples are finite numbers")
    if quality is not None and not 1 <= quality <= 100:
        raise ValueError(f"quality {quality}: it goes from 1 to 100")


def _write(path: Path, clip: Clip, format: str, form: _Form, quality: int, parameters: Parameters) -> None:
    import av

    crf = form.crf[0] + (100 - quality) * form.crf[1]
    with av.open(str(path), "w", format=format, options=dict(form.container)) as container:
        container.metadata["comment"] = json.dumps(parameters, sort_keys=True, ensure_ascii=False)
        stream = _video_stream(container, clip, form, {"crf": str(round(crf)), "threads": _THREADS})
        sounds = _sound_packets(container, clip.sound, form) if clip.sound is not None else iter(())
        for frame in clip.frames:
            container.mux(stream.encode(_yuv(frame)))
            next(sounds, None)
        container.mux(stream.encode(None))
        for _ in sounds:
            continue


def _video_stream(
    container: OutputContainer, clip: Clip, form: _Form, options: dict[str, str]
) -> VideoStream:
    from av.video.stream import VideoStream

    stream = container.add_stream(form.video, rate=Fraction(clip.fps).limit_denominator(1001))
    assert isinstance(stream, VideoStream)
    stream.height, stream.width = clip.frames.shape[1:3]
    stream.pix_fmt = "yuv420p"
    context = stream.codec_context
    context.options = {**form.codec, **options}
    context.color_range = _LIMITED
    context.colorspace = context.color_primaries = context.color_trc = _BT709
    return stream


def _sound_packets(container: OutputContainer, sound: Sound, form: _Form) -> Iterator[None]:
    """Writes the sound piece by piece, so that it lies beside its frames in the file."""
    stream = _sound_stream(container, sound, form)

    def write() -> Iterator[None]:
        import av

        step = max(1, round(sound.rate * _PIECE_S))
        for start in range(0, len(sound.samples), step):
            piece = np.clip(sound.samples[start : start + step], -1.0, 1.0)
            planes = np.ascontiguousarray(piece.T, np.float32)
            frame = av.AudioFrame.from_ndarray(planes, format="fltp", layout=_LAYOUTS[len(planes)])
            frame.sample_rate = sound.rate
            frame.pts = start
            frame.time_base = Fraction(1, sound.rate)
            container.mux(stream.encode(frame))
            yield
        container.mux(stream.encode(None))

    return write()


def _sound_stream(container: OutputContainer, sound: Sound, form: _Form) -> AudioStream:
    from av.audio.stream import AudioStream

    rate = sound.rate if sound.rate in form.rates else 48_000
    layout = _LAYOUTS[sound.samples.shape[1]]
    stream = container.add_stream(form.audio, rate=rate, options={"b": "192k"})
    assert isinstance(stream, AudioStream)
    stream.codec_context.layout = layout
    return stream


def _yuv(frame: np.ndarray) -> VideoFrame:
    import av

    rgb = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
    return rgb.reformat(format="yuv420p", dst_colorspace=_BT709, dst_color_range=_LIMITED)
