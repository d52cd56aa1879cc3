"""Opening an MP4 or WebM with FFmpeg's libraries, kept on a short lead: by the form that the file's first bytes say,
with no other file or address behind it, and by the decoders that are listed here alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import IO, TYPE_CHECKING, NoReturn, cast

from saggar.workers.inputs.bad import BadInput
from saggar.workers.inputs.sniff import kind_of

if TYPE_CHECKING:
    from av.codec.context import CodecContext
    from av.container import InputContainer
    from av.stream import Stream

FORMS = {"MP4": "mov", "WEBM": "matroska"}
VIDEO_CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "prores", "mjpeg"})
AUDIO_CODECS = frozenset({"aac", "mp3", "mp3float", "opus", "vorbis", "flac", "alac", "ac3"})
_PCM = "pcm_"
MOST_CHANNELS = 8
RATES = (8000, 192_000)


def is_sound_codec(name: str) -> bool:
    """Of those that are decoded."""
    return name in AUDIO_CODECS or name.startswith(_PCM)


def codec_of(stream: Stream) -> CodecContext:
    """What decodes the stream. Raises BadInput when FFmpeg has nothing for it."""
    found: CodecContext | None = stream.codec_context
    if found is None:
        raise BadInput("is coded in a way that is not known", "codecs that are known")
    return found


@contextmanager
def opened(file: IO[bytes], allowed: str) -> Iterator[InputContainer]:
    """The container. Whatever FFmpeg raises while it is open, reading or decoding, is BadInput."""
    import av

    kind = kind_of(file)
    if kind not in FORMS:
        raise BadInput(f"is nothing that is read here ({kind or 'unknown form'})", allowed)
    try:
        file.seek(0)
        with av.open(
            file,
            format=FORMS[kind],
            metadata_errors="replace",
            io_open=_refuse,
            container_options={"protocol_whitelist": "none", "codec_whitelist": _decoders()},
        ) as container:
            yield cast("InputContainer", container)
    except (BadInput, MemoryError):
        raise
    except (av.FFmpegError, ValueError, OverflowError) as error:
        text = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise BadInput(f"is damaged, or cut short: {text[:120]}", allowed) from error


@cache
def _decoders() -> str:
    """The names of those that FFmpeg may use when it looks into a file, before we see what is in it."""
    import av

    pcm = {name for name in av.codecs_available if name.startswith(_PCM)}
    return ",".join(sorted(VIDEO_CODECS | AUDIO_CODECS | pcm))


def _refuse(url: str, flags: int, options: dict[str, str]) -> NoReturn:
    """A file that names another one: a way to make the worker read what the sender cannot."""
    raise BadInput("refers to another file", "files that hold all that they show")
