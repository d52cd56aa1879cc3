"""Inputs and outputs that are not text and not pictures: what is refused, and how they are told apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from pydantic import Field
from saggar.engine import InvalidRequest, LoadError, Output, Request, open_family
from saggar.engine.config import WarmUp
from saggar.engine.media import Clip, Sound
from saggar.engine.models.inputs import blank, check_inputs, shapes
from saggar.engine.models.noop import Noop
from saggar.engine.models.tiny import make_tiny
from saggar.engine.params import check_params, check_schema, schema_of

PICTURE = np.zeros((4, 6, 3), np.uint8)
CLIP = Clip(np.zeros((5, 4, 6, 3), np.uint8), 24.0)
SOUND = Sound(np.zeros((100, 2), np.float32), 44100)
TAKEN = {"image": (1, 2), "mask": (0, 1), "audio": (0, 1), "video": (0, 1)}


def test_every_kind_in_its_form_is_taken() -> None:
    given: dict[str, Any] = {
        "image": [PICTURE, np.zeros((4, 6, 4), np.uint8)],
        "audio": [SOUND],
        "video": [CLIP],
    }
    check_inputs({**given, "mask": [PICTURE[..., 0]]}, TAKEN)
    check_inputs({"image": [PICTURE], "mask": []}, TAKEN)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("inputs.image", {}),
        ("inputs.image", {"image": [PICTURE] * 3}),
        ("inputs.depth", {"image": [PICTURE], "depth": [PICTURE]}),
        ("inputs.image[1]", {"image": [PICTURE, PICTURE.astype(np.float32)]}),
        ("inputs.image[0]", {"image": [PICTURE[..., 0]]}),
        ("inputs.image[0]", {"image": [PICTURE[..., :2]]}),
        ("inputs.image[0]", {"image": [PICTURE[:0]]}),
        ("inputs.image[0]", {"image": [CLIP]}),
        ("inputs.mask[0]", {"image": [PICTURE], "mask": [PICTURE]}),
        ("inputs.audio[0]", {"image": [PICTURE], "audio": [replace(SOUND, rate=0)]}),
        ("inputs.audio[0]", {"image": [PICTURE], "audio": [replace(SOUND, samples=SOUND.samples + np.nan)]}),
        ("inputs.audio[0]", {"image": [PICTURE], "audio": [replace(SOUND, samples=SOUND.samples[:, 0])]}),
        ("inputs.video[0]", {"image": [PICTURE], "video": [replace(CLIP, fps=float("inf"))]}),
        ("inputs.video[0]", {"image": [PICTURE], "video": [PICTURE]}),
    ],
)
def test_anything_else_is_refused_by_its_name(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_inputs(given, TAKEN)
    assert refused.value.field == field


def test_rows_with_inputs_of_other_sizes_do_not_share_a_batch(tmp_path: Path) -> None:
    family = open_family(str(make_tiny("noop", tmp_path / "noop")))
    plain = family.validate(Request("a", "x"))
    small, large = (replace(plain, inputs={"image": [np.zeros((n, 6, 3), np.uint8)]}) for n in (4, 5))
    assert len({family.batch_key(one) for one in (plain, small, large)}) == 3
    assert family.batch_key(small) == family.batch_key(replace(small, id="b", prompt="y"))
    assert shapes({"video": [CLIP], "image": [PICTURE], "mask": []}) == "image=4x6x3;video=5x4x6x3"


def test_a_parameter_of_another_task_is_refused_unless_it_is_its_default() -> None:
    schema: Any = {
        "properties": {
            "strength": {"type": "number", "default": 0.6, "x-tasks": ["i2i"]},
            "n": {"type": "integer"},
        }
    }
    assert check_params({"strength": 0.6}, schema, "t2i")["strength"] == 0.6
    assert check_params({"strength": 0.3}, schema, "i2i")["strength"] == 0.3
    with pytest.raises(InvalidRequest, match=r"params.strength.*says nothing to t2i.*i2i"):
        check_params({"strength": 0.3}, schema, "t2i")


def test_a_task_may_have_defaults_of_its_own() -> None:
    words: Any = {"type": "number", "default": 3.5, "x-defaults": {"i2i": 7.0}}
    schema: Any = {"properties": {"scale": words}}
    assert check_params({}, schema, "t2i") == {"scale": 3.5}
    assert check_params({}, schema, "i2i") == {"scale": 7.0}
    assert check_params({"scale": 3.5}, schema, "i2i") == {"scale": 3.5}
    words["x-defaults"]["i2i"] = "much"
    with pytest.raises(LoadError, match="scale: its default 'much' is not of type number"):
        check_schema(schema)


def test_a_default_of_the_checkpoint_is_for_every_task() -> None:
    @dataclass
    class Params:
        scale: Annotated[float, Field(json_schema_extra={"x-defaults": {"i2i": 7.0}})] = 3.5

    assert check_params({}, schema_of(Params), "i2i") == {"scale": 7.0}
    assert check_params({}, schema_of(Params, settings={"scale": {"default": 2.0}}), "i2i") == {"scale": 2.0}


def test_a_model_that_takes_files_is_warmed_up_with_blank_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Noop, "tasks", ("edit",))
    monkeypatch.setattr(Noop, "inputs", {"edit": TAKEN})
    family = open_family(str(make_tiny("noop", tmp_path / "noop")))
    request = family.warmup_request(WarmUp(params={"height": 16}))
    assert request.task == "edit"
    assert [one.shape for one in request.inputs["image"]] == [
        (16, family.validate(request).params["width"], 3)
    ]  # type: ignore[union-attr]
    every = blank(dict.fromkeys(TAKEN, (1, 1)), (16, 24))
    check_inputs(every, TAKEN)
    assert set(every) == set(TAKEN)


def test_a_model_says_what_it_makes_and_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(make_tiny("noop", tmp_path / "noop"))
    monkeypatch.setattr(Noop, "tasks", ("t2v", "i2v"))
    monkeypatch.setattr(Noop, "inputs", {"i2v": {"image": (1, 1)}})
    monkeypatch.setattr(Noop, "medium", "video")
    told = open_family(folder).info("m", 4).to_dict()
    assert (told["medium"], told["task_inputs"]) == ("video", {"i2v": {"image": [1, 1]}})


def test_an_output_gives_its_media_by_their_kind() -> None:
    def output(*media: Any) -> Output:
        return Output("a", list(media), [1] * len(media), "b", 1, 1, {}, "n")

    assert output(CLIP).clips == [CLIP]
    assert output(SOUND).sounds == [SOUND]
    assert output(PICTURE, PICTURE).images[1] is PICTURE
    with pytest.raises(TypeError, match="not every one of these 1 media is a picture"):
        _ = output(CLIP).images
    assert (CLIP.seconds, SOUND.seconds) == (5 / 24, 100 / 44100)
