"""Sounds to files: WAV (16 bits, what every player takes) and FLAC (24 bits), with their parameters as the comment."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping

import numpy as np
from saggar.engine.media import Sound
from saggar.workers.encode import Encoded, Facts, Parameters

_FORMS: Mapping[str, tuple[str, str]] = {
    "wav": ("audio/wav", "PCM_16"),
    "flac": ("audio/flac", "PCM_24"),
}
MOST_CHANNELS = 8


def encode_sound(sound: Sound, format: str, parameters: Parameters) -> Encoded:
    """One file; samples beyond -1..1 are cut off. The same sound and parameters give the same bytes.

    Raises ValueError for another array or format, and for samples that are no finite numbers.
    """
    import soundfile

    if format not in _FORMS:
        raise ValueError(f"{format!r} is no format of sounds; there are {', '.join(_FORMS)}")
    samples = sound.samples
    if samples.ndim != 2 or not 1 <= samples.shape[1] <= MOST_CHANNELS or 0 in samples.shape:
        raise ValueError(f"a sound is samples × 1 to {MOST_CHANNELS} channels, not {samples.shape}")
    if not np.isfinite(samples).all():
        raise ValueError("a sound's samples are finite numbers")
    content_type, subtype = _FORMS[format]
    channels = samples.shape[1]
    comment = json.dumps(parameters, sort_keys=True, ensure_ascii=False)
    target = io.BytesIO()
    with soundfile.SoundFile(target, "w", sound.rate, channels, subtype, format=format.upper()) as file:
        if format == "flac":
            file.comment = comment
        file.write(np.clip(samples, -1.0, 1.0))
    facts = Facts(duration_s=sound.seconds, sample_rate=sound.rate, channels=channels)
    data = _commented(target.getvalue(), comment) if format == "wav" else target.getvalue()
    return Encoded.of(data, content_type, format, facts)


def _commented(wav: bytes, comment: str) -> bytes:
    """With a LIST chunk of INFO behind the sound: libsndfile drops a WAV's comment of more than a few kilobytes."""
    text = _chunk(b"ICMT", comment.encode() + b"\0")
    body = wav[8:] + bytes(len(wav) % 2) + _chunk(b"LIST", b"INFO" + text)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _chunk(name: bytes, data: bytes) -> bytes:
    return name + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)
