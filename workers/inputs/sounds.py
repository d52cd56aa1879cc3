"""Sounds: WAV, FLAC, Ogg and MP3 by libsndfile, those of MP4 and WebM by FFmpeg's libraries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

import numpy as np
from saggar.engine.media import Sound
from saggar.workers.inputs.bad import BadInput
from saggar.workers.inputs.container import FORMS, MOST_CHANNELS, RATES, codec_of, is_sound_codec, opened
from saggar.workers.inputs.policy import Limits
from saggar.workers.inputs.sniff import kind_of

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
    from av.container import InputContainer

ALLOWED = "WAV, FLAC, Ogg, MP3, or the sound of an MP4 or WebM"
_SNDFILE = {"WAV": ("WAV", "WAVEX", "RF64"), "FLAC": ("FLAC",), "OGG": ("OGG",), "MP3": ("MP3", "MPEG")}
_STREAMED = (0, 0xFFFFFFFF)  # sizes that a writer leaves which cannot go back
_UNKNOWN = (1 << 63) - 1  # libsndfile's SF_COUNT_MAX


@dataclass(frozen=True)
class Track:
    """A sound's measures: at most so many `samples` of each channel."""

    samples: int
    rate: int
    channels: int

    @property
    def bytes(self) -> int:
        """Of its float32 samples, twice while pieces are joined."""
        return 2 * self.kept

    @property
    def kept(self) -> int:
        """Of its float32 samples."""
        return self.samples * self.channels * 4


class SoundFile:
    """A sound's header, checked; `read` decodes it."""

    def __init__(self, file: IO[bytes], limits: Limits) -> None:
        """Raises BadInput."""
        self._file = file
        self._kind = kind_of(file)
        if self._kind in FORMS:
            with opened(file, ALLOWED) as container:
                track = measure_track(container, limits)
            if track is None:
                raise BadInput("has no sound in it", ALLOWED)
        elif self._kind in _SNDFILE:
            track = self._header(limits)
        else:
            raise BadInput(f"is no sound that is read ({self._kind or 'unknown form'})", ALLOWED)
        self._track = track
        self.bytes, self.kept = track.bytes, track.kept

    def read(self) -> Sound:
        """float32, samples × channels, what is outside of -1..1 cut off. Raises BadInput."""
        if self._kind in FORMS:
            with opened(self._file, ALLOWED) as container:
                return decode_track(container, self._track)
        import soundfile

        try:
            self._file.seek(0)
            with soundfile.SoundFile(self._file) as sound:
                samples = sound.read(self._track.samples, dtype="float32", always_2d=True)
        except (soundfile.LibsndfileError, RuntimeError, ValueError) as error:
            raise BadInput(f"cannot be decoded: {_said(error)}", ALLOWED) from error
        if len(samples) < self._track.samples and self._kind != "MP3":  # its header is an estimate
            raise BadInput("is cut short: it has fewer samples than it says", ALLOWED)
        return _sound(samples, self._track.rate)

    def _header(self, limits: Limits) -> Track:
        import soundfile

        self._refuse_cut_wav()
        try:
            with soundfile.SoundFile(self._file) as sound:
                form, track = sound.format, Track(sound.frames, sound.samplerate, sound.channels)
        except (soundfile.LibsndfileError, RuntimeError, ValueError, TypeError) as error:
            raise BadInput(f"is damaged: {_said(error)}", ALLOWED) from error
        if form not in _SNDFILE[self._kind]:
            raise BadInput(f"is {form} under another name", ALLOWED)
        if track.samples == _UNKNOWN:  # libsndfile does not read these to their end
            raise BadInput("does not say how long it is", "a FLAC that was written to a file, not to a pipe")
        return check_track(track, limits)

    def _refuse_cut_wav(self) -> None:
        """libsndfile reads what is there and says nothing."""
        head = self._file.read(12)
        size = self._file.seek(0, 2)
        self._file.seek(0)
        said = int.from_bytes(head[4:8], "little")
        if head[:4] == b"RIFF" and said not in _STREAMED and said + 8 > size + 1:  # a pad byte may lack
            raise BadInput("is cut short: it is smaller than it says", ALLOWED)


def check_track(track: Track, limits: Limits) -> Track:
    """The track itself. Raises BadInput."""
    if track.samples <= 0:
        raise BadInput("has no sound in it", ALLOWED)
    if not RATES[0] <= track.rate <= RATES[1]:
        raise BadInput(f"has a sample rate of {track.rate} Hz", f"{RATES[0]} to {RATES[1]} Hz")
    if not 1 <= track.channels <= MOST_CHANNELS:
        raise BadInput(f"has {track.channels} channels", f"1 to {MOST_CHANNELS}")
    if track.samples > limits.seconds * track.rate:
        raise BadInput(f"lasts {track.samples / track.rate:.1f} s", f"at most {limits.seconds:g} s")
    return track


def measure_track(container: InputContainer, limits: Limits) -> Track | None:
    """The first sound of a container; None without one. Raises BadInput."""
    if not container.streams.audio:
        return None
    stream = container.streams.audio[0]
    codec_of(stream)
    context = stream.codec_context
    if not is_sound_codec(context.name):
        raise BadInput(
            f"has sound that is coded as {context.name}", "AAC, MP3, Opus, Vorbis, FLAC, ALAC, PCM"
        )
    if stream.duration is not None and stream.time_base is not None:
        seconds = float(stream.duration * stream.time_base)
    else:
        seconds = (container.duration or 0) / 1_000_000
    samples = int((seconds or limits.seconds) * context.rate)
    return check_track(Track(samples, context.rate, context.channels), limits)


def decode_track(container: InputContainer, track: Track) -> Sound:
    """Decodes what was measured; a second more is a lie. Raises BadInput."""
    import av

    stream = container.streams.audio[0]
    stream.codec_context.options = {"err_detect": "explode"}
    resampler = av.AudioResampler(format="fltp", layout=stream.codec_context.layout, rate=track.rate)
    pieces: list[np.ndarray] = []
    count = 0

    def take(frames: list[AudioFrame]) -> None:
        nonlocal count
        for frame in frames:
            pieces.append(frame.to_ndarray().T)
            count += frame.samples
            if count > track.samples + track.rate:
                raise BadInput("has more sound than it says", ALLOWED)

    for frame in container.decode(stream):
        take(resampler.resample(frame))
    if count:
        take(resampler.resample(None))
    else:
        raise BadInput("has no sound in it", ALLOWED)
    return _sound(np.concatenate(pieces), track.rate)


def _sound(samples: np.ndarray, rate: int) -> Sound:
    if not np.isfinite(samples).all():
        raise BadInput("holds samples that are no finite numbers (NaN or infinity)", "finite samples")
    return Sound(np.clip(samples, -1.0, 1.0).astype(np.float32, copy=False), rate)


def _said(error: Exception) -> str:
    """libsndfile's own words, without the file object that soundfile puts in front."""
    return str(getattr(error, "error_string", error))[:120]
