"""Wan beyond parity: which checkpoint takes what, two transformers at once, first and last pictures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from saggar.engine import InvalidRequest, LoadError, Request, open_family
from saggar.engine.models.state import RequestState, Row
from saggar.engine.platform.base import Placement

from tests.engine.conftest import MakeEngine
from tests.engine.families import BY_NAME
from tests.engine.media_made import distance, made
from tests.engine.plain import ATOL, assert_equal, plain_pipeline
from tests.engine.support import Recorder, at_step, eventually

Models = Callable[[str], Path]
FLOATS = Placement("float32", "float32/cpu", torch.device("cpu"), torch.float32)


def copied(folder: Path, to: Path, **words: Any) -> Path:
    """A copy whose model_index.json has these words."""
    shutil.copytree(folder, to)
    path = to / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | words))
    return to


@pytest.mark.parametrize(
    ("model", "tasks", "counts"),
    [
        ("wan", ("t2v",), {}),
        ("wan-a14b", ("t2v",), {}),
        ("wan-5b", ("t2v", "i2v"), {"i2v": {"image": (1, 1)}}),
        ("wan-i2v", ("i2v",), {"i2v": {"image": (1, 1)}}),
        ("wan-flf", ("i2v",), {"i2v": {"image": (2, 2)}}),
        ("wan-i2v-a14b", ("i2v",), {"i2v": {"image": (1, 2)}}),
    ],
)
def test_a_checkpoint_says_what_it_is_for(
    models: Models, model: str, tasks: tuple[str, ...], counts: dict[str, Any]
) -> None:
    family = open_family(str(models(model)))
    info = family.info(model, 1)
    assert (info.medium, info.tasks, dict(info.task_inputs)) == ("video", tasks, counts)
    other = "i2v" if tasks == ("t2v",) else "t2i"
    with pytest.raises(InvalidRequest, match=f"is not a task of this model .*{', '.join(tasks)}") as caught:
        family.validate(Request("x", "x", task=other))
    assert caught.value.field == "task"


def test_pictures_of_any_size_share_a_forward(make_engine: MakeEngine, models: Models) -> None:
    case = BY_NAME["wan-i2v-a14b"]
    engine = make_engine(case.tiny, pixels="float32", max_batch=4, warmup=())
    few = {"num_inference_steps": 2}
    sizes = [(50, 70), (64, 64), (40, 90, 4)]
    requests = [
        case.request(f"r{n}", "clay", {"image": [size]}, seed=n, params=few) for n, size in enumerate(sizes)
    ]
    ends = case.request("ends", "clay", {"image": [(50, 70), (30, 30)]}, seed=0, params=few)
    outputs = engine.generate([*requests, ends])
    assert {output.batch_size for output in outputs} == {4}
    plain = plain_pipeline(models(case.tiny), "wan-flf-a14b")
    opaque = [made({"image": [size]}, n)["image"][0][..., :3] for n, size in enumerate(sizes)]  # type: ignore[call-overload,index]
    for request, output, picture in zip(requests, outputs, opaque, strict=False):
        seen = Request(
            request.id, request.prompt, request.seed, "i2v", params=few, inputs={"image": [picture]}
        )
        assert_equal(output, plain(seen))
    assert_equal(outputs[-1], plain(ends))
    assert distance(outputs[0].media, outputs[-1].media) > 100 * ATOL


def test_a_picture_that_is_too_narrow_is_refused(models: Models) -> None:
    family = open_family(str(models("wan-flf")))
    with pytest.raises(InvalidRequest) as caught:
        family.validate(BY_NAME["wan-flf"].request("x", "x", {"image": [(20, 320), (321, 20)]}))
    assert (caught.value.field, caught.value.allowed) == ("inputs.image[1]", "sides of 1 to 16 at most")


def test_requests_on_both_sides_of_the_border_run_in_one_step(
    make_engine: MakeEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = BY_NAME["wan-a14b"]
    engine = make_engine(case.tiny, mode="step_batch", pixels="float32", max_batch=6, warmup=())
    family = engine._loops[0].executor._runner.family  # type: ignore[attr-defined]
    steps: list[tuple[str, ...]] = []
    whole = family.denoise_step

    def watched(states: Sequence[RequestState[torch.Tensor, Any, Any]], rows: int) -> Any:
        steps.append(tuple(family.step_key(state) for state in states))
        return whole(states, rows)

    monkeypatch.setattr(family, "denoise_step", watched)
    params = {"num_inference_steps": 6, "guidance_scale": 4.0, "guidance_scale_2": 1.5}
    early, late, plain_later = (
        case.request(name, f"a {name} kiln", seed=n, num_outputs=n, params=own)
        for n, (name, own) in enumerate(
            {
                "first": params,
                "second": {**params, "num_inference_steps": 4},
                "unguided": {"num_inference_steps": 5, "guidance_scale": 1.0},
            }.items(),
            1,
        )
    )
    later: list[Any] = []
    first = engine.submit(
        early,
        on_event=at_step("first", 3, lambda: later.extend(map(engine.submit, (late, plain_later)))),
    )
    outputs = [first.result(60)]
    eventually(lambda: len(later) == 2)
    outputs += [handle.result(60) for handle in later]
    plain = plain_pipeline(models(case.tiny), case.name)
    for request, output in zip((early, late, plain_later), outputs, strict=True):
        assert output.batch_id == outputs[0].batch_id
        assert_equal(output, plain(request))
    assert ("transformer_2", "transformer", "transformer") in steps


def test_the_border_belongs_to_the_first_transformer(models: Models, tmp_path: Path) -> None:
    folder = copied(models("wan-a14b"), tmp_path / "border", boundary_ratio=0.75)
    family: Any = open_family(str(folder))
    family.load(FLOATS)
    state = family.new_state(family.validate(BY_NAME["wan"].requests()[0]))
    family.prepare_encode([state])
    state.timesteps = torch.tensor([751, 750, 749])
    keys = []
    for state.step_index in range(3):
        keys.append(family.step_key(state))
    assert keys == ["transformer", "transformer", "transformer_2"]


def test_a_border_without_its_second_transformer_is_refused(models: Models, tmp_path: Path) -> None:
    folder = copied(models("wan"), tmp_path / "half", boundary_ratio=0.9)
    with pytest.raises(LoadError, match="transformer_2 is missing, which boundary_ratio asks for"):
        open_family(str(folder)).load(FLOATS)


def test_a_second_guidance_is_refused_where_there_is_one_transformer(models: Models) -> None:
    request = Request("x", "x", task="t2v", params={"guidance_scale_2": 3.0})
    assert open_family(str(models("wan-a14b"))).validate(request).params["guidance_scale_2"] == 3.0
    with pytest.raises(InvalidRequest) as caught:
        open_family(str(models("wan"))).validate(request)
    assert (caught.value.field, caught.value.allowed) == ("params.guidance_scale_2", "null")


def test_rows_with_and_without_a_picture_have_timesteps_of_their_own(models: Models) -> None:
    family: Any = open_family(str(models("wan-5b")))
    family.load(FLOATS)
    requests = [
        BY_NAME["wan-5b"].request("text", "clay", seed=1),
        BY_NAME["wan-5b-i2v"].request("picture", "clay", seed=2),
    ]
    states = [family.new_state(family.validate(request)) for request in requests]
    assert len({family.batch_key(state.request) for state in states}) == 2
    with torch.inference_mode():
        family.prepare_encode(states)
        rows = [Row(state, 0) for state in states]
        together = family.predict(rows, "cond")
        alone = torch.cat([family.predict([row], "cond") for row in rows])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_the_pace_of_a_clip_is_the_requests_and_its_previews_are_strips(make_engine: MakeEngine) -> None:
    engine = make_engine("wan", warmup=())
    recorder = Recorder()
    params = {"num_frames": 21, "fps": 12.5, "height": 32, "num_inference_steps": 2}
    request = Request("slow", "clay", task="t2v", params=params, preview_every=1)
    (clip,) = engine.submit(request, on_event=recorder).result(60).clips
    assert (clip.frames.shape, clip.frames.dtype) == ((21, 32, 64, 3), np.uint8)
    assert (clip.fps, clip.seconds, clip.sound) == (12.5, 21 / 12.5, None)
    strips = [event.preview for event in recorder.events if event.preview is not None]
    assert [strip.shape for strip in strips] == [(4, 4 * 8, 3)] * 2
