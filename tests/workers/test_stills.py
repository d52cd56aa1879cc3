"""Videos and sounds in what is made of finished files: sheets, gates, comparisons."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from saggar.engine import Engine, EngineConfig
from saggar.engine.media import Clip, Sound
from saggar.engine.models.tiny import make_tiny
from saggar.jobs.schema import Job
from saggar.storage.local import LocalStorage
from saggar.workers.encode_media import encode_media
from saggar.workers.publish import Origin, Publisher
from saggar.workers.runs.gates import Candidate, GateError, parse_gates
from saggar.workers.runs.regenerate import recorded, remake
from saggar.workers.runs.samples import Recorded
from saggar.workers.runs.sheet import SheetFailed, make_sheet
from saggar.workers.runs.verify import verify
from saggar.workers.stills import media_of, still_of
from saggar.workers.translate import to_request

from tests.support.inputs import image, tone


def video(count: int = 20) -> bytes:
    """It grows brighter from frame to frame."""
    frames = np.empty((count, 16, 32, 3), np.uint8)
    frames[:] = np.linspace(20, 220, count).astype(np.uint8)[:, None, None, None]
    return next(encode_media(Clip(frames, 8.0), "mp4", 95, {})).data


def wav(samples: np.ndarray) -> bytes:
    return next(encode_media(Sound(samples, 48_000), "wav", None, {})).data


def test_a_video_is_shown_by_four_frames_from_first_to_last() -> None:
    strip = still_of(video())
    assert strip.shape == (16, 4 * 32, 3)
    shades = [int(strip[8, 16 + 32 * index, 0]) for index in range(4)]
    np.testing.assert_allclose(shades, [20, 83, 157, 220], atol=8)
    assert still_of(video(1)).shape == (16, 32, 3)


def test_a_sound_is_shown_by_its_wave() -> None:
    samples = tone(1.0)
    samples[24_000:] = 0
    still = still_of(wav(samples))
    ink = (still[:, :, 0] < 200).sum(axis=0)
    assert ink[:190].min() > 10 * ink[200:].max() / 3


def test_sheets_hold_pictures_videos_and_sounds() -> None:
    with Image.open(io.BytesIO(make_sheet([(image(), "a"), (video(), "b"), (wav(tone()), "c")]))) as sheet:
        assert sheet.width > 3 * 128
    with pytest.raises(SheetFailed):
        make_sheet([(video()[:200], "cut")])


def test_gates_judge_a_video_by_its_frames_and_no_sound() -> None:
    gates = parse_gates(["black", "blank"])
    assert gates.judge(Candidate.of_file("k", video())).accepted
    dark = np.zeros((5, 16, 32, 3), np.uint8)
    rejected = gates.judge(Candidate.of_file("k", next(encode_media(Clip(dark, 8.0), "mp4", None, {})).data))
    assert rejected.rejected_by is not None and rejected.rejected_by.name == "black"
    with pytest.raises(GateError, match="a sound has no picture"):
        Candidate.of_file("k", wav(tone()))


def test_files_come_back_as_media() -> None:
    clip = media_of(video())
    assert isinstance(clip, Clip) and clip.frames.shape == (20, 16, 32, 3)
    sound = media_of(wav(tone()))
    assert isinstance(sound, Sound)
    np.testing.assert_allclose(sound.samples, tone(), atol=1e-4)
    layer = media_of(image("RGBA", color=(1, 2, 3, 4)))
    assert isinstance(layer, np.ndarray) and layer[0, 0].tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"damaged|cut short|no pictures"):
        media_of(video()[:300])


@pytest.mark.parametrize(
    ("model", "task", "output", "params"),
    [
        ("noop-video", "t2v", {"format": "mp4"}, {"sound_hz": 440.0}),
        ("noop-video", "t2v", {"format": "webm", "quality": 60}, {}),
        ("noop-video", "t2v", {"format": "png"}, {}),
        ("noop-audio", "t2a", {"format": "wav"}, {}),
        ("noop-audio", "t2a", {"format": "flac"}, {}),
    ],
)
def test_media_made_again_are_the_same(
    model: str, task: str, output: dict[str, object], params: dict[str, object], tmp_path: Path
) -> None:
    storage = LocalStorage(tmp_path / "store")
    fields = {"model": model, "task": task, "seed": 3, "num_outputs": 2, "output": output, "params": params}
    job = Job.model_validate({"id": "j", "prompt": "p", **fields})
    with Engine.make(EngineConfig(model=str(make_tiny(model, tmp_path / model)), executor="local")) as engine:
        publisher = Publisher(storage, None, Origin(model, engine.info.revision, {}))
        publisher.commit(publisher.upload(job, 1, engine.generate([to_request(job)])[0], lambda: True))
        report = verify(storage, picks=10)
        assert report.clean and len(report.picks) == 2
        known = [one for one in recorded(storage, report.picks) if isinstance(one, Recorded)]
        assert [one.status for one in remake(engine, known)] == ["bit-equal"] * 2
        others = [replace(one, seed=one.seed + 1) for one in known]
        assert [one.status for one in remake(engine, others)] == ["differs"] * 2
