"""Videos: measured by their packets before anything is decoded, then every frame as RGB."""

from __future__ import annotations

import math
from typing import IO, TYPE_CHECKING

import numpy as np
from saggar.engine.media import Clip
from saggar.workers.inputs.bad import BadInput
from saggar.workers.inputs.container import VIDEO_CODECS, codec_of, opened
from saggar.workers.inputs.policy import Limits
from saggar.workers.inputs.sounds import decode_track, measure_track

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

ALLOWED = "MP4 or WebM with H.264, H.265, VP8, VP9, AV1, MPEG-4, ProRes or Motion JPEG"
_PADDING = 1 << 20
"""Pixels that a decoder may add to a frame: whole blocks, and borders beside them."""
_CUT_S = 1.0
"""By so much may a file say that it lasts longer than its packets do: containers round."""


class Video:
    """A video's measures, checked; `read` decodes it."""

    def __init__(self, file: IO[bytes], limits: Limits) -> None:
        """Raises BadInput."""
        self._file, self._limits = file, limits
        with opened(file, ALLOWED) as container:
            stream = video_stream(container)
            self._width, self._height = stream.codec_context.width, stream.codec_context.height
            self._check_size(stream)
            self._fps = float(stream.average_rate or stream.guessed_rate or 0)
            if not 0 < self._fps <= 1000:
                raise BadInput("does not say how many frames a second it has", "1 to 1000")
            self._track = measure_track(container, limits)
            self._frames = self._count(container, stream)
        self._check_length()
        frame = self._width * self._height * 3
        self.bytes = (2 * self._frames + 1) * frame + (self._track.bytes if self._track else 0)
        self.kept = self._frames * frame + (self._track.kept if self._track else 0)

    def read(self) -> Clip:
        """Frames turned as the file says. Raises BadInput."""
        with opened(self._file, ALLOWED) as container:
            frames = self._decode(container)
        sound = None
        if self._track is not None:
            with opened(self._file, ALLOWED) as container:
                sound = decode_track(container, self._track)
        return Clip(frames, self._fps, sound)

    def _check_size(self, stream: VideoStream) -> None:
        if stream.codec_context.name not in VIDEO_CODECS:
            raise BadInput(f"is coded as {stream.codec_context.name}", ALLOWED)
        if not 0 < self._width * self._height <= self._limits.pixels:
            allowed = f"frames of 1 to {self._limits.pixels} pixels"
            raise BadInput(f"has frames of {self._width} x {self._height} pixels", allowed)

    def _count(self, container: InputContainer, stream: VideoStream) -> int:
        """Frames, by the packets: one each. Ends early once there are too many."""
        frames, end = 0, 0.0
        for packet in container.demux(stream):
            if packet.size == 0:
                continue
            if packet.is_corrupt:
                raise BadInput("is damaged, or cut short", ALLOWED)
            frames += 1
            if frames > self._limits.frames:
                raise BadInput(
                    f"has more than {self._limits.frames} frames", f"at most {self._limits.frames}"
                )
            if packet.pts is not None:
                end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        said = max(stream.frames / self._fps, (container.duration or 0) / 1_000_000)
        self._seconds = max(end, said)
        if frames < stream.frames or (stream.frames == 0 and end + _CUT_S < said):
            raise BadInput("is cut short: it has fewer frames than it says", ALLOWED)
        return frames

    def _check_length(self) -> None:
        if self._frames == 0:
            raise BadInput("has no frames", ALLOWED)
        if self._seconds > self._limits.seconds:
            raise BadInput(f"lasts {self._seconds:.1f} s", f"at most {self._limits.seconds:g} s")

    def _decode(self, container: InputContainer) -> np.ndarray:
        stream = video_stream(container)
        stream.codec_context.options = {
            "max_pixels": str(2 * self._width * self._height + _PADDING),
            "err_detect": "explode",
        }
        stream.codec_context.thread_count = 2
        frames: np.ndarray | None = None
        count = 0
        for frame in container.decode(stream):
            if frame.is_corrupt:
                raise BadInput("is damaged: a frame cannot be decoded", ALLOWED)
            if frame.width * frame.height > self._width * self._height:  # room was counted for those
                said, has = f"{self._width} x {self._height}", f"{frame.width} x {frame.height}"
                raise BadInput(f"has frames of {has} pixels and says {said}", "frames as large as it says")
            picture = rgb(frame)
            if frames is None:
                frames = np.empty((self._frames, *picture.shape), np.uint8)
            if picture.shape != frames.shape[1:]:
                raise BadInput("has frames of several sizes", "frames of one size")
            if count == self._frames:
                raise BadInput("has more frames than packets", ALLOWED)
            frames[count] = picture
            count += 1
        if frames is None or count < self._frames * 9 // 10:
            raise BadInput(f"is damaged: {count} of {self._frames} frames can be decoded", ALLOWED)
        return frames[:count]


def video_stream(container: InputContainer) -> VideoStream:
    """The first of a container. Raises BadInput when there is none."""
    if not container.streams.video:
        raise BadInput("has no pictures in it", ALLOWED)
    stream = container.streams.video[0]
    codec_of(stream)
    return stream


def rgb(frame: VideoFrame) -> np.ndarray:
    """uint8 H×W×3 by the frame's own colour space and range, turned as its display matrix says."""
    picture = frame.to_ndarray(format="rgb24", src_color_range=frame.color_range or None)
    turns = round(frame.rotation / 90) % 4 if math.isfinite(frame.rotation) else 0
    return np.rot90(picture, turns) if turns else picture
