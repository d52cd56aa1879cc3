"""Files hold the very pixels, their parameters can be read again, and equal inputs give equal bytes."""

from __future__ import annotations

import hashlib
import html
import io
import json
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFont
from saggar.workers.contact_sheet import contact_sheet, wrapped
from saggar.workers.encode import (
    Encoded,
    encode_image,
    image_format,
    parameters_line,
)
from saggar.workers.sidecar import sidecar, sidecar_bytes

PARAMETERS = {
    "model": "saggar/emoji",
    "prompt": "a jar, “blue” & <glazed> 釉",
    "negative_prompt": "cracks",
    "seed": 7,
    "params": {"steps": 20, "guidance": 3.5, "width": 64, "height": 48, "tiling": False},
    "loras": [],
}
FORMATS = ["png", "webp", "jpeg"]


def picture(height: int = 48, width: int = 64, seed: int = 0) -> np.ndarray:
    """Smooth colours with a little grain."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    smooth = np.stack([x * 3, y * 4, (x + y) * 2], axis=-1) + rng.integers(0, 4, (height, width, 3))
    return smooth.clip(0, 255).astype(np.uint8)


def opened(encoded: Encoded) -> Image.Image:
    image = Image.open(io.BytesIO(encoded.data))
    image.load()
    return image


def read_back(encoded: Encoded) -> tuple[object, str]:
    """(the parameters, the line) that a file carries."""
    image = opened(encoded)
    if image.format == "PNG":
        return json.loads(image.info["saggar"]), image.info["parameters"]
    packet = image.info["xmp"].decode()
    text = packet.split("<saggar:parameters>")[1].split("</saggar:parameters>")[0]
    comment = image.getexif().get_ifd(0x8769)[0x9286]
    assert comment.startswith(b"UNICODE\0")
    return json.loads(html.unescape(text)), comment[8:].decode("utf-16-be")


@pytest.mark.parametrize("format", FORMATS)
def test_parameters_can_be_read_again(format: str) -> None:
    parameters, line = read_back(encode_image(picture(), format, None, PARAMETERS))
    assert parameters == PARAMETERS
    assert line == parameters_line(PARAMETERS)


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=25, deadline=None)
@given(prompt=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=200))
def test_any_prompt_can_be_read_again(format: str, prompt: str) -> None:
    parameters, _ = read_back(encode_image(picture(8, 8), format, 90, {"prompt": prompt}))
    assert parameters == {"prompt": prompt}


def test_png_holds_the_very_pixels() -> None:
    for shape in ((1, 1), (48, 64), (65, 3)):
        array = picture(*shape)
        np.testing.assert_array_equal(np.asarray(opened(encode_image(array, "png", None, {}))), array)


def test_arrays_that_are_views_are_taken_as_they_look() -> None:
    array = picture().transpose(1, 0, 2)[::-1]
    np.testing.assert_array_equal(np.asarray(opened(encode_image(array, "png", None, {}))), array)


@pytest.mark.parametrize("format", ["webp", "jpeg"])
def test_lossy_formats_are_close_and_quality_counts(format: str) -> None:
    array = picture(256, 256)
    best, worst = (encode_image(array, format, quality, {}) for quality in (95, 10))
    assert len(worst.data) < len(best.data)
    difference = np.asarray(opened(best)).astype(int) - array
    assert np.abs(difference).mean() < 4


@pytest.mark.parametrize(
    ("format", "content_type", "extension", "magic"),
    [
        ("png", "image/png", "png", b"\x89PNG"),
        ("webp", "image/webp", "webp", b"RIFF"),
        ("jpeg", "image/jpeg", "jpg", b"\xff\xd8\xff"),
    ],
)
def test_what_a_file_is(format: str, content_type: str, extension: str, magic: bytes) -> None:
    encoded = encode_image(picture(), format, 90, PARAMETERS)
    assert (encoded.content_type, encoded.extension) == (content_type, extension)
    assert encoded.data.startswith(magic)
    assert encoded.sha256 == hashlib.sha256(encoded.data).hexdigest()


@pytest.mark.parametrize("format", FORMATS)
def test_equal_inputs_give_equal_bytes(format: str) -> None:
    reordered = dict(reversed(PARAMETERS.items()))
    assert encode_image(picture(), format, 80, PARAMETERS) == encode_image(picture(), format, 80, reordered)
    assert encode_image(picture(), format, 80, PARAMETERS) != encode_image(picture(), format, 80, {"seed": 8})


@pytest.mark.parametrize("filler", ["x", "&", '"', "釉", "🏺", "\x01"])
def test_a_jpeg_bears_prompts_of_any_length(filler: str) -> None:
    parameters = {**PARAMETERS, "prompt": filler * 60_000, "negative_prompt": filler * 60_000}
    read, _ = read_back(encode_image(picture(), "jpeg", None, parameters))
    assert isinstance(read, dict)
    assert read["shortened"] is True
    assert (read["seed"], read["params"]) == (7, PARAMETERS["params"])
    assert parameters["prompt"].startswith(read["prompt"])


def test_a_jpeg_bears_parameters_of_any_length() -> None:
    read, _ = read_back(
        encode_image(picture(), "jpeg", None, {**PARAMETERS, "params": {"sigmas": [0.5] * 9000}})
    )
    assert isinstance(read, dict)
    assert read["seed"] == 7
    assert "params" not in read


def test_the_line_is_what_viewers_expect() -> None:
    assert parameters_line(PARAMETERS) == (
        "a jar, “blue” & <glazed> 釉\n"
        "Negative prompt: cracks\n"
        "Model: saggar/emoji, Seed: 7, Steps: 20, CFG scale: 3.5, Size: 64x48, tiling: false"
    )
    assert parameters_line({"prompt": "x"}) == "x\n"


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 2), np.uint8),
        np.zeros((3, 4, 5), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
        np.zeros((4, 4, 3), np.float32),
    ],
)
def test_other_arrays_are_refused(array: np.ndarray) -> None:
    with pytest.raises(ValueError, match="picture"):
        encode_image(array, "png", None, {})


@pytest.mark.parametrize(("format", "quality"), [("gif", None), ("PNG", None), ("jpeg", 0), ("webp", 101)])
def test_other_formats_and_qualities_are_refused(format: str, quality: int | None) -> None:
    with pytest.raises(ValueError, match=r"format|quality"):
        encode_image(picture(), format, quality, {})


def test_the_format_of_a_job_that_names_none_is_png() -> None:
    assert [image_format(name) for name in (None, "png", "webp", "jpeg")] == ["png", "png", "webp", "jpeg"]
    with pytest.raises(ValueError, match="mp4"):
        image_format("mp4")


def test_the_sidecar_tells_everything() -> None:
    encoded = encode_image(picture(), "png", None, PARAMETERS)
    content = sidecar(
        job_id="job",
        attempt=2,
        index=1,
        seed=8,
        request=PARAMETERS,
        model="saggar/emoji",
        revision="abc",
        versions={"torch": "2.11"},
        numerics="float32/cpu",
        batch_id="b1",
        batch_size=4,
        steps=20,
        timings={"denoise": 0.5},
        encoded=encoded,
        created=datetime(2030, 1, 2, tzinfo=UTC),
    )
    read = json.loads(sidecar_bytes(content))
    assert read == content
    assert read["request"] == PARAMETERS
    assert read["file"] == {
        "content_type": "image/png",
        "sha256": encoded.sha256,
        "bytes": len(encoded.data),
        "width": 64,
        "height": 48,
    }
    assert read["model"] == {"name": "saggar/emoji", "revision": "abc"}
    assert read["batch"] == {"id": "b1", "size": 4}
    assert (read["index"], read["seed"], read["attempt"], read["steps"]) == (1, 8, 2, 20)
    assert read["created"] == "2030-01-02T00:00:00+00:00"


def test_a_contact_sheet_holds_every_picture_in_order() -> None:
    colours = [(200, 30, 30), (30, 200, 30), (30, 30, 200), (200, 200, 30), (30, 200, 200)]
    images = [np.full((64, 64, 3), colour, np.uint8) for colour in colours]
    sheet = np.asarray(Image.open(io.BytesIO(contact_sheet(images, ["a jar"] * 5, 3))))
    assert sheet.shape == (2 * (128 + 3 * 17 + 12) + 12, 3 * (128 + 12) + 12, 3)
    for number, colour in enumerate(colours):
        row, column = divmod(number, 3)
        tile = sheet[12 + row * 191 : 12 + row * 191 + 128, 12 + column * 140 : 12 + column * 140 + 128]
        np.testing.assert_array_equal(tile, np.broadcast_to(np.array(colour), tile.shape))


def test_a_contact_sheet_takes_pictures_of_all_sizes() -> None:
    images = [picture(16, 64), picture(1024, 512), picture(200, 200), picture(1, 300)]
    sheet = Image.open(io.BytesIO(contact_sheet(images, ["", "釉 🏺", "word " * 100, "x" * 500], 4)))
    assert sheet.size == (4 * (300 + 12) + 12, 384 + 3 * 17 + 12 + 12)


@pytest.mark.parametrize(("count", "captions", "columns"), [(0, 0, 1), (1, 2, 1), (1, 1, 0)])
def test_sheets_that_cannot_be(count: int, captions: int, columns: int) -> None:
    with pytest.raises(ValueError, match="sheet"):
        contact_sheet([picture()] * count, ["x"] * captions, columns)


@given(st.text(max_size=300))
def test_captions_stay_within_their_tile(caption: str) -> None:
    font = ImageFont.load_default(13)
    lines = wrapped(caption, 128, font)
    assert len(lines) <= 3
    assert all(font.getlength(line) <= 128 for line in lines)
