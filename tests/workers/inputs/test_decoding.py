"""What files become: as diffusers reads them, and one clear error for each that is bad."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from diffusers.utils import load_image
from PIL import Image
from saggar.engine.media import Clip, Sound
from saggar.jobs.errors import InvalidJob
from saggar.jobs.schema import Job
from saggar.workers.inputs.bad import BadInput
from saggar.workers.inputs.container import opened
from saggar.workers.inputs.decoders import Stopped
from saggar.workers.inputs.fetch import Ticket
from saggar.workers.inputs.load import InputLoader
from saggar.workers.inputs.pictures import Picture
from saggar.workers.inputs.sniff import kind_of

from tests.support.inputs import (
    BAD_IMAGES,
    BAD_SOUNDS,
    BAD_VIDEOS,
    RED,
    decoders,
    image,
    input_loader,
    many_scans,
    nan_wav,
    sound,
    sound_only,
    tone,
    turned_jpeg,
    video,
)


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., object]:
    """Puts a file into the store's uploads and loads it as a job's only input of a kind."""
    (tmp_path / "uploads").mkdir()

    def load(kind: str, data: bytes, task: str = "i2i", loader: InputLoader | None = None) -> object:
        (tmp_path / "uploads" / "file").write_bytes(data)
        loader = loader or input_loader(tmp_path.as_uri())
        with loader.held(job(tmp_path, kind, task), Ticket()) as inputs:
            return inputs[kind][0]

    return load


def job(folder: Path, kind: str, task: str = "i2i") -> Job:
    uri = (folder / "uploads" / "file").as_uri()
    return Job.model_validate({"model": "noop", "prompt": "p", "task": task, "inputs": {kind: [uri]}})


def sixteen_bits(form: str) -> bytes:
    target = io.BytesIO()
    Image.fromarray(np.arange(96, dtype=np.uint16).reshape(8, 12) * 600).save(target, form)
    return target.getvalue()


PICTURES: dict[str, Callable[[], bytes]] = {
    "png": image,
    "jpeg": lambda: image(form="JPEG"),
    "webp": lambda: image(form="WEBP"),
    "bmp": lambda: image(form="BMP"),
    "gif": lambda: image("P", "GIF", color=3),
    "tiff": lambda: image(form="TIFF"),
    "avif": lambda: image(form="AVIF"),
    "gray": lambda: image("L", color=77),
    "gray with alpha": lambda: image("LA", color=(77, 100)),
    "palette": lambda: image("P", color=5),
    "one bit": lambda: image("1", color=1),
    "cmyk": lambda: image("CMYK", "JPEG", color=(10, 200, 90, 20)),
    "alpha": lambda: image("RGBA", color=(200, 30, 60, 90)),
    **{f"turned {way}": (lambda way=way: turned_jpeg(way)) for way in range(1, 9)},
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_diffusers_makes_of_it(name: str, load: Callable[..., np.ndarray]) -> None:
    data = PICTURES[name]()
    wanted = load_image(Image.open(io.BytesIO(data)))
    found = load("image", data)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, np.asarray(wanted))
    np.testing.assert_array_equal(load("mask", data), np.asarray(wanted.convert("L")))


def test_gray_of_16_bits_keeps_its_upper_8(load: Callable[..., np.ndarray]) -> None:
    """`load_image` makes white of everything above 255."""
    wanted = (np.arange(96, dtype=np.uint16).reshape(8, 12) * 600 >> 8).astype(np.uint8)
    for form in ("PNG", "TIFF"):
        found = load("image", sixteen_bits(form))
        np.testing.assert_array_equal(found, np.stack([wanted] * 3, axis=2))
        np.testing.assert_array_equal(load("mask", sixteen_bits(form)), wanted)


def test_alpha_is_kept_for_tasks_that_take_it(load: Callable[..., np.ndarray], tmp_path: Path) -> None:
    plain = input_loader(tmp_path.as_uri())
    loader = InputLoader(plain._fetcher, ["layers"], decoders())
    data = image("RGBA", color=(200, 30, 60, 90))
    assert load("image", data, "layers", loader)[0, 0].tolist() == [200, 30, 60, 90]
    assert load("image", data, "i2i", loader)[0, 0].tolist() == [200, 30, 60]
    assert load("image", image(), "layers", loader)[0, 0].tolist() == [*RED, 255]


@pytest.mark.parametrize(("form", "codec"), [("mp4", "libx264"), ("webm", "libvpx-vp9"), ("mp4", "mpeg4")])
def test_a_video_keeps_its_frames_rate_and_sound(form: str, codec: str, load: Callable[..., Clip]) -> None:
    data = video(12, (48, 32), form=form, codec=codec, fps=Fraction(24000, 1001), sound=tone())
    clip = load("video", data, "v2v")
    assert clip.frames.shape == (12, 32, 48, 3)
    assert clip.fps == pytest.approx(24000 / 1001, rel=1e-3)
    assert np.abs(clip.frames.astype(int) - RED).max() <= 6
    assert clip.sound is not None
    assert clip.sound.rate == 48_000
    assert clip.sound.seconds == pytest.approx(0.5, abs=0.05)
    assert np.abs(clip.sound.samples).max() == pytest.approx(0.4, abs=0.05)
    assert load("video", video(), "v2v").sound is None


@pytest.mark.parametrize(
    ("form", "codec", "pix_fmt"),
    [
        ("mp4", "libx264", "yuv444p"),
        ("mp4", "libx265", "yuv420p"),
        ("mp4", "libsvtav1", "yuv420p"),
        ("webm", "libvpx", "yuv420p"),
        ("matroska", "libx264", "yuv420p"),
        ("mov", "prores_ks", "yuv422p10le"),
        ("mov", "mjpeg", "yuvj420p"),
    ],
)
def test_the_codecs_that_are_promised(form: str, codec: str, pix_fmt: str, load: Callable[..., Clip]) -> None:
    clip = load("video", video(5, (64, 48), form=form, codec=codec, pix_fmt=pix_fmt), "v2v")
    assert clip.frames.shape == (5, 48, 64, 3)
    assert np.abs(clip.frames.astype(int) - RED).max() <= 6, "full range and limited, 8 bits and 10"


def test_a_video_is_turned_as_its_file_says(load: Callable[..., Clip]) -> None:
    """As phones write it: a matrix that turns it clockwise by 90°."""
    picture = np.zeros((32, 64, 3), np.uint8)
    picture[:, :32] = RED
    data = video(3, (64, 32), picture=picture)
    plain, turned = (b"".join(n.to_bytes(4, "big", signed=True) for n in m) for m in (
        (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30),
        (0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30),
    ))  # fmt: skip
    track = data.index(b"tkhd")
    place = data.index(plain, track)
    clip = load("video", data[:place] + turned + data[place + len(plain) :], "v2v")
    assert clip.frames.shape == (3, 64, 32, 3)
    assert np.abs(clip.frames[0, 8, 16].astype(int) - RED).max() <= 8, "its left side is on top"
    assert clip.frames[0, 56, 16].max() <= 8


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3"])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_sound_is_samples_by_channels(form: str, channels: int, load: Callable[..., Sound]) -> None:
    found = load("audio", sound(tone(channels=channels), form), "a2a")
    assert (found.samples.dtype, found.samples.shape[1], found.rate) == (np.float32, channels, 48_000)
    assert found.seconds == pytest.approx(0.5, abs=0.06)
    if form in ("WAV", "FLAC"):
        np.testing.assert_allclose(found.samples, tone(channels=channels), atol=1e-4)


def test_the_sound_of_a_container_is_read_too(load: Callable[..., Sound]) -> None:
    found = load("audio", sound_only(), "a2a")
    assert (found.rate, found.samples.shape[1]) == (48_000, 2)
    assert found.seconds == pytest.approx(0.5, abs=0.05)


def test_samples_beyond_one_are_cut_off(load: Callable[..., Sound]) -> None:
    found = load("audio", sound(tone() * 5, subtype="FLOAT"), "a2a")
    assert np.abs(found.samples).max() == 1.0


BAD = [
    *(("image", name, *case) for name, case in BAD_IMAGES.items()),
    *(("mask", name, *case) for name, case in list(BAD_IMAGES.items())[:5]),
    *(("video", name, *case) for name, case in BAD_VIDEOS.items()),
    *(("audio", name, *case) for name, case in BAD_SOUNDS.items()),
]


@pytest.mark.parametrize(("kind", "name", "make", "says"), BAD, ids=[f"{one[0]}: {one[1]}" for one in BAD])
def test_a_bad_file_is_one_error_that_names_it(
    kind: str, name: str, make: Callable[[], bytes], says: str, load: Callable[..., object]
) -> None:
    with pytest.raises(InvalidJob) as refused:
        load(kind, make())
    text = str(refused.value)
    assert text.startswith(f"inputs.{kind}[0]: ") and "(allowed: " in text
    assert says in text
    assert "Errno" not in text
    assert len(text) < 400


def test_room_is_taken_for_all_files_and_given_back(tmp_path: Path, load: Callable[..., object]) -> None:
    loader = input_loader(tmp_path.as_uri())
    (tmp_path / "uploads" / "file").write_bytes(image(size=(50, 20)))
    with loader.held(job(tmp_path, "image"), Ticket()):
        assert loader._budget.used == 50 * 20 * 3
    assert loader._budget.used == 0
    with pytest.raises(InvalidJob):
        load("audio", nan_wav(), "a2a", loader)
    assert loader._budget.used == 0


def test_what_no_room_is_large_enough_for_is_refused(tmp_path: Path, load: Callable[..., object]) -> None:
    with pytest.raises(InvalidJob, match="inputs: take 140000 bytes while they are decoded"):
        load("image", image(size=(100, 100)), loader=input_loader(tmp_path.as_uri(), memory=100_000))


def test_a_ticket_ends_the_wait_for_room(tmp_path: Path) -> None:
    loader = input_loader(tmp_path.as_uri(), memory=1_000_000)
    (tmp_path / "uploads").mkdir()
    (tmp_path / "uploads" / "file").write_bytes(image(size=(200, 200)))
    ticket = Ticket()
    with loader._budget.hold(900_000, Ticket().over):
        loader._budget._changed.wait = lambda _: ticket.cancel()  # type: ignore[method-assign,assignment,misc]
        with pytest.raises(Stopped), loader.held(job(tmp_path, "image"), ticket):
            pass
    assert loader._budget.used == 0


def test_pages_are_not_counted() -> None:
    """A second one is looked for, and no further: a file of 200 MB may hold ten millions."""
    frame = b"\x21\xf9\x04\0\x01\0\0\0\x2c\0\0\0\0\x01\0\x01\0\0\x02\x02\x44\x01\0"
    file = Counting(b"GIF89a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff" + frame * 50_000 + b";")
    with pytest.raises(BadInput, match="is animated or has several pages"):
        Picture(file, 1 << 20, "RGB")
    assert file.count < 5_000


class Counting(io.BytesIO):
    """Bytes read."""

    count = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.count += len(data)
        return data


def test_what_is_counted_for_a_picture_depends_on_its_library() -> None:
    for form, peak in (("PNG", 14), ("JPEG", 14), ("WEBP", 24), ("AVIF", 24)):
        with tempfile.TemporaryFile() as file:
            file.write(image(form=form))
            assert Picture(file, 1 << 20, "RGB").bytes == 12 * 8 * peak


def test_a_jpeg_of_passes_and_of_two_pictures_is_read(load: Callable[..., np.ndarray]) -> None:
    """Progressive, with segments that hold pictures, and with bytes of any kind behind its end, as phones write it."""
    thumbnail = image(form="JPEG", size=(8, 8), progressive=True)
    behind = many_scans(500)
    data = image(form="JPEG", progressive=True, comment=thumbnail * 20) + behind
    assert load("image", data).shape == (8, 12, 3)
    two = io.BytesIO()
    Image.new("RGB", (12, 8), RED).save(
        two, "MPO", save_all=True, append_images=[Image.new("RGB", (6, 4), RED)]
    )
    assert load("image", two.getvalue()).shape == (8, 12, 3)
    assert load("image", many_scans(100)).shape == (64, 64, 3)


def test_a_file_is_looked_into_by_the_named_codecs_alone() -> None:
    """FFmpeg would open whatever it has for a track, to learn its pixel format, before we see what the track is."""
    for codec, known in (("mpeg2video", False), ("libx264", True)):
        with opened(io.BytesIO(video(codec=codec, fps=Fraction(25))), "") as container:
            assert (container.streams.video[0].codec_context.pix_fmt is not None) == known


def test_bytes_say_what_a_file_is() -> None:
    webm = video(form="webm", codec="libvpx-vp9")
    files = [image(), sound(), sound(form="MP3"), video(), webm]
    assert [kind_of(io.BytesIO(data)) for data in files] == ["PNG", "WAV", "MP3", "MP4", "WEBM"]
