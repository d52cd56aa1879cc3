"""Whatever a model makes, as files: one for most media, several where a video is written as its frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from saggar.engine.media import Clip, Media, Medium, Sound
from saggar.workers import encode
from saggar.workers.encode import Encoded, Parameters, encode_image
from saggar.workers.encode_sound import encode_sound
from saggar.workers.encode_video import encode_video

FORMATS: Mapping[Medium, tuple[str, ...]] = {
    "image": encode.FORMATS,
    "video": ("mp4", "webm", "png"),
    "audio": ("wav", "flac"),
}
"""What jobs may ask for, by what the model makes; the first is the default."""


def encode_media(
    media: Media, format: str | None, quality: int | None, parameters: Parameters
) -> Iterator[Encoded]:
    """The files of one picture, video or sound, in order; a video as `png` is a picture a frame, then its sound (WAV).

    Raises ValueError for a format that this medium does not have, and for what the encoders refuse.
    """
    if isinstance(media, Clip):
        yield from _of_clip(media, format or FORMATS["video"][0], quality, parameters)
    elif isinstance(media, Sound):
        yield encode_sound(media, format or FORMATS["audio"][0], parameters)
    else:
        yield encode_image(media, encode.image_format(format), quality, parameters)


def _of_clip(clip: Clip, format: str, quality: int | None, parameters: Parameters) -> Iterator[Encoded]:
    if format != "png":
        yield encode_video(clip, format, quality, parameters)
        return
    for frame in clip.frames:
        encoded = encode_image(frame, "png", None, parameters)
        yield replace(encoded, facts=replace(encoded.facts, fps=clip.fps))
    if clip.sound is not None:
        yield encode_sound(clip.sound, "wav", parameters)
