"""Input files for tests, good and bad, and a loader of them."""

from __future__ import annotations

import atexit
import io
import struct
import zlib
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile
from PIL import Image
from saggar.workers.inputs.decoders import Decoders
from saggar.workers.inputs.fetch import Fetcher
from saggar.workers.inputs.load import InputLoader
from saggar.workers.inputs.policy import Limits, Policy

RED = (200, 30, 60)


def input_loader(store_url: str, *sources: str, **limits: Any) -> InputLoader:
    """As a worker of this store would make it; all share their decoders."""
    return InputLoader(Fetcher(Policy.make(store_url, sources), Limits(**limits)), decoders=decoders())


@cache
def decoders() -> Decoders:
    found = Decoders()
    atexit.register(found.close)
    return found


def image(mode: str = "RGB", form: str = "PNG", size: tuple[int, int] = (12, 8), **options: Any) -> bytes:
    """A picture of one colour; `color` for another one."""
    color = options.pop("color", RED if mode == "RGB" else None)
    target = io.BytesIO()
    Image.new(mode, size, color if color is not None else 0).save(target, form, **options)
    return target.getvalue()


def turned_jpeg(orientation: int, size: tuple[int, int] = (12, 8)) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return image(form="JPEG", size=size, exif=exif)


def animation(form: str) -> bytes:
    first, *rest = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in (0, 90, 200)]
    target = io.BytesIO()
    first.save(target, form, save_all=True, append_images=rest)
    return target.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that says how large it is and holds hardly a byte of that."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def video(
    frames: int = 5,
    size: tuple[int, int] = (32, 16),
    *,
    form: str = "mp4",
    codec: str = "libx264",
    fps: Fraction = Fraction(8),
    sound: np.ndarray | None = None,
    faststart: bool = True,
    color: tuple[int, int, int] = RED,
    pix_fmt: str = "yuv420p",
    picture: np.ndarray | None = None,
) -> bytes:
    """Frames of one colour, or of one picture; `sound`: float32 [samples, 2] at 48 kHz."""
    width, height = size
    options = {"movflags": "+faststart"} if form == "mp4" and faststart else {}
    target = io.BytesIO()
    path = _Path() if options else None
    with av.open(str(path.name) if path else target, "w", format=form, options=options) as container:
        stream: Any = container.add_stream(codec, rate=fps)
        stream.width, stream.height = width, height
        stream.pix_fmt = pix_fmt
        track: Any = None
        if sound is not None:
            track = container.add_stream("aac" if form == "mp4" else "libopus", rate=48_000)
            track.layout = "stereo"
        picture = np.full((height, width, 3), color, np.uint8) if picture is None else picture
        for _ in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
        if sound is not None:
            planes = np.ascontiguousarray(sound.T)
            frame = av.AudioFrame.from_ndarray(planes, format="fltp", layout="stereo")
            frame.sample_rate = 48_000
            container.mux(track.encode(frame))
            container.mux(track.encode(None))
    return path.take() if path else target.getvalue()


class _Path:
    """A file that goes once it is read: `faststart` writes a file's beginning at its end."""

    def __init__(self) -> None:
        import tempfile

        self.name = Path(tempfile.mkdtemp(prefix="saggar-test-")) / "video.mp4"

    def take(self) -> bytes:
        data = self.name.read_bytes()
        self.name.unlink()
        self.name.parent.rmdir()
        return data


def tone(seconds: float = 0.5, rate: int = 48_000, channels: int = 2) -> np.ndarray:
    wave = 0.4 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)
    return np.stack([wave] * channels, axis=1).astype(np.float32)


def sound(samples: np.ndarray | None = None, form: str = "WAV", rate: int = 48_000, **options: Any) -> bytes:
    target = io.BytesIO()
    soundfile.write(target, tone(rate=rate) if samples is None else samples, rate, format=form, **options)
    return target.getvalue()


def streamed_flac() -> bytes:
    """As written to a pipe: it does not say of how many samples it is."""
    data = bytearray(sound(form="FLAC"))
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    return bytes(data)


def nan_wav() -> bytes:
    samples = tone()
    samples[100] = np.nan
    return sound(samples, subtype="FLOAT")


def flipped(data: bytes, begin: float = 0.5, every: int = 7) -> bytes:
    """Every so many bytes of its end turned over."""
    changed = bytearray(data)
    for index in range(int(len(data) * begin), len(data), every):
        changed[index] ^= 0xFF
    return bytes(changed)


def claims_frames(frames: int) -> bytes:
    """A small MP4 whose index says that it has so many frames, of a byte each: FFmpeg makes an entry of each."""
    data = bytearray(video())
    for name, place, value in (
        (b"stsz", 8, 1),
        (b"stsz", 12, frames),
        (b"stts", 12, frames),
        (b"stsc", 16, frames),
    ):
        begin = data.index(name) + place
        data[begin : begin + 4] = struct.pack(">I", value)
    return bytes(data)


def many_scans(scans: int, size: tuple[int, int] = (64, 64)) -> bytes:
    """A progressive JPEG that repeats its last pass so many times."""
    data = image(form="JPEG", size=size, progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * scans + data[-2:]


def larger_frames() -> bytes:
    """VP8 of 992 x 992 pixels in a WebM that says 16 x 16."""
    data = video(3, (992, 992), form="webm", codec="libvpx")
    for name in (b"\xb0\x82", b"\xba\x82"):
        data = data.replace(name + struct.pack(">H", 992), name + struct.pack(">H", 16))
    return data


def playlist() -> bytes:
    """What FFmpeg, left to guess, takes for a list of further files."""
    return b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"


def sound_only() -> bytes:
    """An MP4 without pictures."""
    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as container:
        track: Any = container.add_stream("aac", rate=48_000)
        track.layout = "stereo"
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(tone().T), format="fltp", layout="stereo")
        frame.sample_rate = 48_000
        container.mux(track.encode(frame))
        container.mux(track.encode(None))
    return target.getvalue()


def _noise(form: str) -> bytes:
    target = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(target, form)
    return target.getvalue()


BAD_IMAGES: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "is an empty file"),
    "text": (lambda: b"just a text", "unknown form"),
    "svg": (lambda: b"<?xml version='1.0'?>\n<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
    "html": (lambda: b"<!DOCTYPE html><html><body>404</body></html>", "HTML"),
    "cut png": (lambda: image(size=(200, 200), color=RED)[:-40], "cannot be decoded"),
    "cut jpeg": (lambda: _noise("JPEG")[:900], "cannot be decoded"),
    "many passes": (
        lambda: many_scans(200),
        "is a JPEG of too many scans or segments (allowed: at most 128 ",
    ),
    "many comments": (
        lambda: b"\xff\xd8" + b"\xff\xfe\0\x02" * 20_000 + image(form="JPEG")[2:],
        "is a JPEG of too many scans or segments",
    ),
    "32 bits": (lambda: image("I", "TIFF"), "has channels of 32 bits (allowed: 8 or 16 bits a channel)"),
    "floats": (lambda: image("F", "TIFF"), "has channels of 32 bits (allowed: 8 or 16 bits a channel)"),
    "header alone": (lambda: image()[:20], "cannot be read: OSError"),
    "huge header": (lambda: png_header(60_000, 60_000), "far too many pixels"),
    "large header": (
        lambda: png_header(9000, 9000),
        "has 9000 x 9000 pixels (allowed: at most 67108864 pixels)",
    ),
    "little behind a header": (lambda: png_header(4000, 4000), "cannot be decoded"),
    "animated gif": (lambda: animation("GIF"), "is animated or has several pages"),
    "animated webp": (lambda: animation("WEBP"), "is animated or has several pages"),
    "animated png": (lambda: animation("PNG"), "is animated or has several pages"),
    "pages": (lambda: animation("TIFF"), "is animated or has several pages"),
    "a video": (video, "is no picture that is read (MP4)"),
    "a sound": (sound, "is no picture that is read (WAV)"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "unknown form"),
    "an icon": (lambda: image("RGBA", "ICO", (16, 16)), "unknown form"),
}
BAD_VIDEOS: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "is an empty file"),
    "a picture": (image, "is nothing that is read here (PNG)"),
    "an animated gif": (lambda: animation("GIF"), "is nothing that is read here (GIF)"),
    "a playlist": (playlist, "unknown form"),
    "a beginning": (lambda: video()[:40], "has no pictures in it"),
    "cut, its index first": (lambda: video(frames=40)[:-200], "cut short"),
    "cut, its index last": (lambda: video(faststart=False)[:-200], "is damaged, or cut short"),
    "damaged": (lambda: flipped(video(frames=60, size=(64, 64)), 0.7), "damaged"),
    "long": (lambda: video(frames=30, fps=Fraction(1, 10)), "lasts 300.0 s (allowed: at most 120 s)"),
    "many frames": (lambda: video(frames=1030, size=(16, 16), fps=Fraction(100)), "more than 1024 frames"),
    "no pictures": (sound_only, "has no pictures in it"),
    "a vast index": (lambda: claims_frames(2_000_000), "is cut short: it has fewer frames than it says"),
    "larger frames": (larger_frames, "has frames of 992 x 992 pixels and says 16 x 16"),
    "an old codec": (
        lambda: video(form="mp4", codec="mpeg2video", fps=Fraction(25)),
        "is coded as mpeg2video",
    ),
}
BAD_SOUNDS: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "is an empty file"),
    "a picture": (image, "is no sound that is read (PNG)"),
    "cut wav": (lambda: sound()[:-5000], "is cut short"),
    "cut flac": (lambda: sound(form="FLAC")[:-3000], "cannot be decoded"),
    "streamed flac": (
        streamed_flac,
        "does not say how long it is (allowed: a FLAC that was written to a file",
    ),
    "no samples": (lambda: sound(np.zeros((0, 2), np.float32)), "has no sound in it"),
    "not a number": (nan_wav, "NaN"),
    "long": (lambda: sound(np.zeros((121 * 8000, 1)), rate=8000), "lasts 121.0 s (allowed: at most 120 s)"),
    "slow": (lambda: sound(np.zeros((100, 1)), rate=100), "has a sample rate of 100 Hz"),
    "many channels": (lambda: sound(np.zeros((100, 12))), "has 12 channels (allowed: 1 to 8)"),
    "a silent video": (video, "has no sound in it"),
    "a damaged header": (lambda: b"RIFF" + bytes(4) + b"WAVEfmt " + bytes(60), "is damaged"),
}
