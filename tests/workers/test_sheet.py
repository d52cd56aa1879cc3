"""A run's contact sheet, one kind of error; and reading outputs, each store opened once."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from saggar.storage.local import LocalStorage
from saggar.workers.runs import outputs
from saggar.workers.runs.outputs import Outputs
from saggar.workers.runs.sheet import SheetFailed, make_sheet


def picture() -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.full((64, 64, 3), 200, np.uint8)).save(data, "PNG")
    return data.getvalue()


def test_pictures_stand_in_rows_of_eight_and_64_are_enough() -> None:
    with Image.open(io.BytesIO(make_sheet((picture(), f"p{i}") for i in range(7)))) as made:
        assert made.width > made.height > 128, "seven tiles in a row"
        seven = made.height
    with Image.open(io.BytesIO(make_sheet((picture(), "p") for _ in range(100)))) as made:
        assert made.height > 6 * seven
    with Image.open(io.BytesIO(make_sheet((picture(), "p") for _ in range(64)))) as whole:
        assert whole.size == made.size


@pytest.mark.parametrize(
    ("given", "said"),
    [([], "ValueError: 0 pictures"), ([(b"no picture", "p")], "UnidentifiedImageError")],
)
def test_whatever_goes_wrong_is_one_error(given: list[tuple[bytes, str]], said: str) -> None:
    with pytest.raises(SheetFailed, match=r"contact-sheet\.png could not be made: " + said):
        make_sheet(given)


def test_a_store_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    closed: list[str] = []

    def open_bucket(root: str) -> LocalStorage:
        opened.append(root)
        store = LocalStorage(tmp_path / root.removeprefix("s3://"))
        store.close = lambda: closed.append(root)  # type: ignore[method-assign]
        return store

    monkeypatch.setattr(outputs, "open_storage", open_bucket)
    for number in range(6):
        store = LocalStorage(tmp_path / f"b{number % 2}")
        store.put(f"out/j{number}/a1/0-01234567.png", picture(), content_type="image/png")
    (tmp_path / "a b.png").write_bytes(picture())
    with Outputs() as reader:
        for number in range(6):
            assert reader.read(f"s3://b{number % 2}/out/j{number}/a1/0-01234567.png") == picture()
        assert reader.read((tmp_path / "a b.png").as_uri()) == picture()
    assert sorted(opened) == sorted(closed) == ["s3://b0", "s3://b1"]
