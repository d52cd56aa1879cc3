"""Videos and sounds, opened again by other libraries than those that wrote them, where there is one."""

from __future__ import annotations

import io
import json
import wave
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from PIL import Image
from saggar.engine.media import Clip, Sound
from saggar.workers.encode import Encoded, Facts
from saggar.workers.encode_media import FORMATS, encode_media

from tests.support.inputs import tone

PARAMETERS = {"prompt": "a jar, “blue” & <glazed> 釉", "seed": 7, "params": {"steps": 20}}
COLOURS = [(220, 30, 40), (30, 200, 60), (20, 40, 210), (128, 128, 128), (0, 0, 0), (255, 255, 255)]


def clip(
    count: int = 12, size: tuple[int, int] = (64, 48), fps: float = 24.0, sound: Sound | None = None
) -> Clip:
    """A frame a colour, again and again."""
    width, height = size
    frames = np.empty((count, height, width, 3), np.uint8)
    for index in range(count):
        frames[index] = COLOURS[index % len(COLOURS)]
    return Clip(frames, fps, sound)


def one(media: Any, format: str | None, quality: int | None = None) -> Encoded:
    (encoded,) = encode_media(media, format, quality, PARAMETERS)
    return encoded


@pytest.mark.parametrize("format", ["mp4", "webm"])
@pytest.mark.parametrize("fps", [8.0, 24000 / 1001, 30.0, 16.5])
def test_a_video_is_read_again_with_its_frames_rate_size_and_colours(format: str, fps: float) -> None:
    encoded = one(clip(fps=fps), format, 95)
    assert (encoded.content_type, encoded.extension) == (f"video/{format}", format)
    assert encoded.facts == Facts(64, 48, 12, fps, 12 / fps)
    with av.open(io.BytesIO(encoded.data)) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        assert context.name in {"mp4": ("h264",), "webm": ("vp9", "libvpx-vp9")}[format]
        assert (context.width, context.height, context.pix_fmt) == (64, 48, "yuv420p")
        assert (context.color_range, context.colorspace) == (1, 1), "limited range, BT.709"
        assert json.loads(container.metadata.get("comment") or container.metadata["COMMENT"]) == PARAMETERS
        assert float(stream.average_rate or 0) == pytest.approx(fps, rel=1e-3)
        duration = float(Fraction(container.duration or 0, 1_000_000))
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    assert len(frames) == 12
    for index, frame in enumerate(frames):
        assert np.abs(frame.astype(int) - COLOURS[index % 6]).max() <= 6, index
    assert duration == pytest.approx(12 / fps, abs=0.05)


@pytest.mark.parametrize("format", ["mp4", "webm"])
@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (44_100, 2), (48_000, 2), (11_000, 1)])
def test_a_videos_sound_goes_with_it(format: str, rate: int, channels: int) -> None:
    sound = Sound(tone(2.5, rate, channels), rate)
    encoded = one(clip(60, sound=sound), format)
    assert (encoded.facts.sample_rate, encoded.facts.channels) == (rate, channels)
    with av.open(io.BytesIO(encoded.data)) as container:
        stream = container.streams.audio[0]
        made = stream.codec_context.rate
        assert stream.codec_context.name in ("aac", "opus", "libopus")
        assert stream.codec_context.channels == channels
        planes = av.AudioResampler(format="fltp", layout=stream.codec_context.layout, rate=made)
        pieces = [
            piece.to_ndarray() for frame in container.decode(stream) for piece in planes.resample(frame)
        ]
    with av.open(io.BytesIO(encoded.data)) as container:
        assert len(list(container.decode(video=0))) == 60
    samples = np.concatenate(pieces, axis=1)
    assert samples.shape[1] / made == pytest.approx(2.5, abs=0.1), "whole frames of AAC"
    middle = samples[:, samples.shape[1] // 4 : samples.shape[1] * 3 // 4]
    assert np.abs(middle).max() == pytest.approx(0.4, abs=0.05)
    spectrum = np.abs(np.fft.rfft(middle[0]))
    assert np.argmax(spectrum) * made / middle.shape[1] == pytest.approx(440, abs=2)


def test_an_mp4_can_be_played_while_it_comes() -> None:
    """Its index stands before its frames."""
    data = one(clip(), "mp4").data
    assert 0 < data.index(b"moov") < data.index(b"mdat")


@pytest.mark.parametrize("format", ["mp4", "webm"])
def test_quality_counts_and_equal_clips_are_equal_bytes(format: str) -> None:
    rng = np.random.default_rng(0)
    noise = Clip(rng.integers(0, 255, (8, 48, 64, 3), np.uint8), 8.0, Sound(tone(1.0), 48_000))
    assert one(noise, format) == one(noise, format)
    usual, worst = (one(Clip(noise.frames, 8.0), format, quality) for quality in (None, 5))
    assert len(worst.data) < len(usual.data) / 2


@pytest.mark.parametrize("format", ["mp4", "webm"])
def test_frames_that_are_views_are_taken_as_they_look(format: str) -> None:
    frames = clip().frames[::-1, :, ::-1]
    assert one(Clip(frames, 8.0), format).data == one(Clip(np.ascontiguousarray(frames), 8.0), format).data


def test_a_video_as_png_is_a_picture_a_frame_and_then_its_sound() -> None:
    sound = Sound(tone(0.5), 48_000)
    *pictures, last = encode_media(clip(5, sound=sound), "png", None, PARAMETERS)
    assert [one.facts for one in pictures] == [Facts(64, 48, fps=24.0)] * 5
    for index, encoded in enumerate(pictures):
        with Image.open(io.BytesIO(encoded.data)) as picture:
            assert picture.convert("RGB").getpixel((3, 3)) == COLOURS[index]
            assert json.loads(picture.info["saggar"]) == PARAMETERS
        with av.open(io.BytesIO(encoded.data)) as container:  # and by the other reader
            (frame,) = container.decode(video=0)
            assert tuple(frame.to_ndarray(format="rgb24")[3, 3]) == COLOURS[index]
    assert (last.content_type, last.facts.duration_s) == ("audio/wav", 0.5)
    assert len(list(encode_media(clip(5), "png", None, {}))) == 5


@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize(("format", "bits"), [("wav", 16), ("flac", 24)])
def test_a_sound_is_read_again(format: str, bits: int, channels: int) -> None:
    sound = Sound(tone(0.5, 44_100, channels), 44_100)
    encoded = one(sound, format)
    assert (encoded.content_type, encoded.extension) == (f"audio/{format}", format)
    assert encoded.facts == Facts(duration_s=0.5, sample_rate=44_100, channels=channels)
    with av.open(io.BytesIO(encoded.data)) as container:
        stream = container.streams.audio[0]
        assert stream.codec_context.rate == 44_100
        planes = av.AudioResampler(format="fltp", layout=stream.codec_context.layout, rate=44_100)
        pieces = [
            piece.to_ndarray() for frame in container.decode(stream) for piece in planes.resample(frame)
        ]
        comment = container.metadata.get("comment") or container.metadata["COMMENT"]
    np.testing.assert_allclose(np.concatenate(pieces, axis=1).T, sound.samples, atol=2.0 ** (1 - bits))
    assert json.loads(comment) == PARAMETERS
    with soundfile.SoundFile(io.BytesIO(encoded.data)) as file:
        assert file.subtype == f"PCM_{bits}"
    assert one(sound, format) == encoded


def test_a_wav_is_one_to_the_standard_library_too() -> None:
    with wave.open(io.BytesIO(one(Sound(tone(0.5), 48_000), "wav").data)) as file:
        assert (file.getnframes(), file.getframerate(), file.getnchannels()) == (24_000, 48_000, 2)


@pytest.mark.parametrize("format", ["wav", "flac"])
def test_a_sound_bears_prompts_of_any_length_and_samples_beyond_one(format: str) -> None:
    long = {"prompt": "釉" * 20_000}
    (encoded,) = encode_media(Sound(tone(0.1)[1:] * 9, 48_000), format, None, long)
    with av.open(io.BytesIO(encoded.data)) as container:
        found = container.metadata.get("comment") or container.metadata["COMMENT"]
        assert json.loads(found) == long
    with soundfile.SoundFile(io.BytesIO(encoded.data)) as file:
        assert file.frames == 4799
        assert np.abs(file.read()).max() <= 1.0


@pytest.mark.parametrize("form", ["png", "webp"])
def test_transparency_is_kept(form: str) -> None:
    layer = np.full((8, 6, 4), (200, 30, 60, 90), np.uint8)
    encoded = one(layer, form, None if form == "png" else 100)
    with Image.open(io.BytesIO(encoded.data)) as picture:
        assert picture.mode == "RGBA"
        assert picture.getpixel((2, 2))[3] == 90  # type: ignore[index]
    with pytest.raises(ValueError, match="jpeg has no transparency"):
        one(layer, "jpeg")


@pytest.mark.parametrize(
    ("media", "format", "says"),
    [
        (clip(size=(63, 48)), "mp4", "63 x 48: a video has an even width and height"),
        (clip(size=(64, 47)), "webm", "64 x 47: a video has an even width and height"),
        (clip(0), "mp4", "a video is uint8"),
        (Clip(clip().frames.astype(np.float32), 8.0), "mp4", "a video is uint8"),
        (Clip(clip().frames, 0.0), "mp4", "frames a second"),
        (clip(sound=Sound(tone(channels=7), 48_000)), "mp4", "a video's sound has 1, 2, 6 channels"),
        (clip(sound=Sound(np.full_like(tone(), np.inf), 48_000)), "mp4", "finite numbers"),
        (clip(), "wav", "'wav' is no file of a video"),
        (Sound(tone(), 48_000), "png", "'png' is no format of sounds"),
        (Sound(tone()[:0], 48_000), "wav", "a sound is samples"),
        (Sound(np.full_like(tone(), np.nan), 48_000), "wav", "finite numbers"),
        (np.zeros((4, 4, 3), np.uint8), "mp4", "'mp4' is no picture format"),
    ],
)
def test_what_cannot_be_written_is_said(media: Any, format: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        list(encode_media(media, format, None, {}))


def test_each_medium_has_its_formats() -> None:
    assert {medium: formats[0] for medium, formats in FORMATS.items()} == {
        "image": "png",
        "video": "mp4",
        "audio": "wav",
    }
