"""Runs of files into files: local pictures of a manifest go up once, videos and sounds come back in shards."""

from __future__ import annotations

import io
import json
from pathlib import Path

import av
import datasets
import numpy as np
import pytest
import soundfile
import webdataset
from PIL import Image
from saggar.engine.models.noop import colour
from saggar.engine.models.tiny import make_tiny
from saggar.storage.base import open_storage

from tests.support.inputs import image
from tests.workers.runs.support import is_clean, manifest, packed, prompts, saggar

pytestmark = pytest.mark.e2e


def run(file: Path, model: Path, out: Path, *flags: object) -> tuple[int, str]:
    return saggar("run", file, "--model", model, "--to", out, "--executor", "local", *flags)


def test_local_pictures_of_a_manifest_go_up_once(tmp_path: Path, noop: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "img").mkdir()
    colours = [(200, 30, 60), (20, 40, 210)]
    for number, one in enumerate(colours):
        (tmp_path / "img" / f"{number}.png").write_bytes(image(color=one))
    rows = [
        {"prompt": f"p{i}", "task": "i2i", "inputs": {"image": [f"img/{i % 2}.png"]}, "id": f"row{i}"}
        for i in range(6)
    ]
    file = manifest(tmp_path / "p.jsonl", rows)
    status, said = run(file, noop, out, "--plan")
    assert status == 0, said
    assert not list((out / "uploads").glob("*")), "a plan sends nothing"
    status, said = run(file, noop, out)
    assert status == 0, said
    assert len(list((out / "uploads").iterdir())) == 2
    made = sorted(out.glob("row*/a1/*.png"))
    assert len(made) == 6
    for path in made:
        number = int(path.parts[-3].removeprefix("row").partition("-")[0])
        with Image.open(path) as picture:
            assert picture.getpixel((0, 0)) == colours[number % 2]
    status, said = run(file, noop, out)
    assert status == 0 and "6 jobs, 6 done before" in said
    assert is_clean(open_storage(str(out)))


def test_a_bad_local_file_is_told_before_anything_starts_to_run(tmp_path: Path, noop: Path) -> None:
    (tmp_path / "page.html").write_text("<html>")
    (tmp_path / "tone.wav").write_bytes(b"RIFF\x24\0\0\0WAVEfmt ")
    names = ("page.html", "none.png", "tone.wav")
    rows = [{"prompt": "p", "task": "i2i", "inputs": {"image": [name]}} for name in names]
    status, said = run(manifest(tmp_path / "p.jsonl", rows), noop, tmp_path / "out")
    assert status != 0
    assert "line 1: inputs.image: " in said and "line 2: inputs.image: " in said
    assert (
        "line 3: inputs.image: " in said
        and "tone.wav: WAV is no file for inputs.image (allowed: PNG, " in said
    )
    assert "Traceback" not in said


@pytest.mark.parametrize("format", ["mp4", "png"])
def test_videos_lie_in_webdataset_shards(format: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    model = make_tiny("noop-video", tmp_path / "noop-video")
    file = prompts(tmp_path / "p.jsonl", 5, width=32, height=16, sound_hz=440.0)
    flags = ("--format", "webdataset", "--shard-count", 2, "--set", "task=t2v", "--set", f"format={format}")
    status, said = run(file, model, out, *flags, "--gate", "min_bytes:bytes=10")
    assert status == 0, said
    shards = sorted(map(str, (out / "p/data").glob("*.tar")))
    assert len(shards) == 3
    found = list(webdataset.WebDataset(shards, shardshuffle=False))
    assert len(found) == 5
    for sample in found:
        meta, text = json.loads(sample["json"]), sample["txt"].decode()
        first = colour(text, meta["seed"]).astype(int)
        if format == "mp4":
            assert (meta["frames"], meta["fps"], meta["sample_rate"]) == (9, 8.0, 16_000)
            with av.open(io.BytesIO(sample["mp4"])) as container:
                frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        else:
            names = sorted(name for name in sample if name.endswith("png"))
            assert names == [f"{part:04d}.png" for part in range(9)]
            assert soundfile.info(io.BytesIO(sample["0009.wav"])).duration == 9 / 8
            frames = [np.asarray(Image.open(io.BytesIO(sample[name])).convert("RGB")) for name in names]
        assert len(frames) == 9
        for index, frame in enumerate(frames):
            expected = np.minimum(first, 255 - index) + index
            assert np.abs(frame[3, 3].astype(int) - expected).max() <= (0 if format == "png" else 8)
    storage = open_storage(str(out))
    assert is_clean(storage)
    assert packed(storage, "p") == [sample["__key__"] for sample in found]
    assert (out / "contact-sheet.png").exists()


def test_sounds_lie_in_parquet_shards(tmp_path: Path) -> None:
    out = tmp_path / "out"
    model = make_tiny("noop-audio", tmp_path / "noop-audio")
    file = prompts(tmp_path / "p.jsonl", 4, seconds=0.5)
    status, said = run(file, model, out, "--format", "parquet", "--set", "task=t2a")
    assert status == 0, said
    loaded = datasets.load_dataset(
        "parquet", data_files=str(out / "p/data/*.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert len(loaded) == 4
    for row in loaded:
        (file_of,) = row["files"]
        assert file_of["extension"] == "wav" and row["image"] is None
        samples, rate = soundfile.read(io.BytesIO(file_of["bytes"]))
        assert (rate, samples.shape) == (16_000, (8000, 2))
        pitch = 200 + float(colour(row["caption"], row["seed"])[0])
        assert np.argmax(np.abs(np.fft.rfft(samples[:, 0]))) * 2 == pytest.approx(pitch, abs=2)
    assert is_clean(open_storage(str(out)))
    assert (out / "contact-sheet.png").exists()
