"""Folders, names, settings, and what is known of a model without its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from saggar.engine import (
    EngineConfig,
    EngineError,
    InvalidRequest,
    LoadError,
    Request,
    Unsupported,
    families,
    installed,
    open_family,
)
from saggar.engine.config import WarmUp
from saggar.engine.models import registry
from saggar.engine.models.tiny import make_tiny, tiny_models
from saggar.engine.models.torch_family import TorchFamily
from saggar.engine.worker.loader import load

from tests.engine.damage import weights
from tests.engine.families import CASES, VARIANTS

Models = Callable[[str], Path]


def test_a_flux2_is_loaded_without_the_half_of_its_processor_that_reads_images(
    models: Models, tmp_path: Path
) -> None:
    folder = shutil.copytree(models("flux2"), tmp_path / "flux2")
    path = folder / "model_index.json"
    named = {"tokenizer": ["transformers", "PixtralProcessor"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    probes = [
        load(EngineConfig(model=str(model), executor="local", threads=1))[0].family.probe()
        for model in (folder, models("flux2"))
    ]
    assert probes[0] == probes[1]


def test_a_distilled_qwen_image_is_refused_at_load(models: Models, tmp_path: Path) -> None:
    folder = shutil.copytree(models("qwen-image"), tmp_path / "distilled")
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"guidance_embeds": True}))
    with pytest.raises(LoadError, match="distilled guidance"):
        load(EngineConfig(model=str(folder), executor="local", threads=1))


def test_a_folder_without_an_index_or_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"there is no model_index\.json"):
        open_family(str(tmp_path))
    (tmp_path / "model_index.json").write_text("[]")
    with pytest.raises(LoadError, match="not a JSON object"):
        open_family(str(tmp_path))
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(LoadError, match="_class_name is missing"):
        open_family(str(tmp_path))
    (tmp_path / "model_index.json").write_text('{"_class_name": "PaintPipeline"}')
    with pytest.raises(
        Unsupported, match=r"no family serves PaintPipeline; there are .*FluxPipeline, .*NoopPipeline"
    ):
        open_family(str(tmp_path))


def test_an_unknown_name_lists_what_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ASSETS", tmp_path)
    with pytest.raises(Unsupported, match="the known names are: none installed"):
        open_family("saggar/emoji")
    make_tiny("noop", tmp_path / "emoji")
    assert installed() == ["saggar/emoji"]
    assert open_family("saggar/emoji").checkpoint.folder == tmp_path / "emoji"
    with pytest.raises(Unsupported, match=r"no model 'saggar/nothing': .* the known names are: saggar/emoji"):
        open_family("saggar/nothing")


def test_a_tiny_model_that_is_unknown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no tiny model of 'huge': there are "):
        make_tiny("huge", tmp_path)


def test_every_class_that_is_served_has_a_tiny_model_that_opens(models: Models) -> None:
    opened = {name: open_family(str(models(name))) for name in tiny_models()}
    here = {name for name, family in families().items() if family.__module__.startswith("saggar.engine.")}
    assert {family.checkpoint.class_name for family in opened.values()} == here
    for name, family in opened.items():
        assert name.replace("-", "_").startswith(type(family).__module__.rpartition(".")[2])
        assert family.cost(family.warmup_request(WarmUp())) > 0


def test_a_served_class_is_compared_with_plain_diffusers_in_all_its_tasks(models: Models) -> None:
    opened = [open_family(str(models(name))) for name in tiny_models()]
    served = {
        (family.checkpoint.class_name, task)
        for family in opened
        if isinstance(family, TorchFamily)
        for task in family.tasks
    }
    assert served == {(case.served, case.task) for case in CASES}
    assert {case.tiny for case in CASES + VARIANTS} <= set(tiny_models())


def test_what_a_model_takes_is_known_without_its_weights(models: Models, tmp_path: Path) -> None:
    folder = tmp_path / "no weights"
    shutil.copytree(models("flux"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    info = open_family(str(folder)).info("mine", max_batch=4)
    assert (info.model, info.family, info.class_name, info.tasks) == (
        "mine",
        "flux",
        "FluxPipeline",
        ("t2i", "i2i", "inpaint"),
    )
    assert info.batch_fields == ("height", "width", "max_sequence_length")
    plain = json.loads(json.dumps(info.to_dict()))
    schema = plain["params_schema"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["height"] == {
        "type": "integer", "default": 64, "minimum": 8, "maximum": 2048, "multipleOf": 8,
    }  # fmt: skip
    assert schema["properties"]["true_cfg_scale"]["default"] == 1.0
    for words in schema["properties"].values():
        assert set(words) <= {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
                              "enum", "default", "description", "anyOf", "x-tasks", "x-defaults"}  # fmt: skip


def test_without_a_table_of_sizes_there_is_no_resolution_binning(models: Models, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(models("pixart"), tmp_path / "pixart"))
    binned = Request("a", "x", params={"use_resolution_binning": True})
    small, large = open_family(str(folder)), Request("b", "x")
    assert small.cost(small.validate(binned)) == 16 * small.cost(small.validate(large))
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sample_size": 48}))
    (folder / "saggar.json").unlink()
    family = open_family(str(folder))
    assert family.validate(Request("a", "x")).params["use_resolution_binning"] is False
    with pytest.raises(InvalidRequest, match=r"params\.use_resolution_binning: True is not a choice"):
        family.validate(binned)


@pytest.mark.parametrize("name", ["qwen-image", "ltx2", "flux"])
def test_a_schedule_that_is_stretched_to_its_end_has_two_steps(
    models: Models, tmp_path: Path, name: str
) -> None:
    folder = Path(shutil.copytree(models(name), tmp_path / name))
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shift_terminal": 0.1}))
    family = open_family(str(folder))
    with pytest.raises(InvalidRequest, match=r"params\.num_inference_steps: 1 is out of range"):
        family.validate(Request("a", "x", task=family.tasks[0], params={"num_inference_steps": 1}))


def test_an_instruction_is_no_longer_than_a_prompt(models: Models) -> None:
    family = open_family(str(models("sana")))
    lines = ["x" * family.limits["max_prompt_chars"], "x"]
    with pytest.raises(
        InvalidRequest, match=r"params\.complex_human_instruction: 20001 characters are too many"
    ):
        family.validate(Request("a", "x", params={"complex_human_instruction": lines}))
    assert family.validate(Request("a", "x", params={"complex_human_instruction": lines[:1]}))


def test_the_revision_follows_the_content(models: Models, sd3: Path) -> None:
    before = open_family(str(models("sd3"))).checkpoint.revision
    assert open_family(str(sd3)).checkpoint.revision == before
    path = weights(sd3 / "vae")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert open_family(str(sd3)).checkpoint.revision != before


def test_a_tiny_models_tokenizers_and_weights_are_the_same_each_time(models: Models, tmp_path: Path) -> None:
    again = make_tiny("sd3", tmp_path / "again")
    assert open_family(str(again)).checkpoint.revision == open_family(str(models("sd3"))).checkpoint.revision


def test_what_a_checkpoints_own_settings_say(tmp_path: Path) -> None:
    make_tiny("noop", tmp_path)
    assert open_family(str(tmp_path)).validate(Request("a", "x")).negative_prompt is None
    (tmp_path / "saggar.json").write_text('{"negative_prompt": ""}')
    family = open_family(str(tmp_path))
    assert family.validate(Request("a", "x")).negative_prompt == ""
    assert family.validate(Request("a", "x", negative_prompt="bad")).negative_prompt == "bad"
    (tmp_path / "saggar.json").write_text('{"limits": {"max_outputs": 3, "max_prompt_chars": 4}}')
    family = open_family(str(tmp_path))
    assert family.info("x", 1).limits == {"max_outputs": 3, "max_prompt_chars": 4}
    for bad in (
        Request("a", "x", num_outputs=4),
        Request("a", "12345"),
        Request("a", "", negative_prompt="12345"),
    ):
        with pytest.raises(InvalidRequest):
            family.validate(bad)
    (tmp_path / "saggar.json").write_text('{"params": {"height": {"maximum": 10000000}}}')
    with pytest.raises(InvalidRequest, match=r"params\.height"):
        open_family(str(tmp_path)).validate(Request("a", "x", params={"height": 9_000_000}))
    (tmp_path / "saggar.json").write_text('{"negative_prompt": 5}')
    with pytest.raises(LoadError, match="negative_prompt is not a text"):
        open_family(str(tmp_path)).validate(Request("a", "x"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ('{"params": 5}', "params: write an object a parameter"),
        ('{"params": {"height": "large"}}', "params: write an object a parameter"),
        ('{"limits": ["max_outputs"]}', "limits: write an integer from 1 on for each"),
        ('{"limits": {"max_outputs": "16"}}', "limits: write an integer from 1 on for each"),
        ('{"limits": {"max_outputs": 0}}', "limits: write an integer from 1 on for each"),
        ("[]", "not a JSON object"),
    ],
)
def test_settings_that_cannot_be_read_are_refused(tmp_path: Path, settings: str, says: str) -> None:
    make_tiny("noop", tmp_path)
    (tmp_path / "saggar.json").write_text(settings)
    with pytest.raises(LoadError, match=says):
        open_family(str(tmp_path))


def test_settings_that_name_no_parameter_are_refused(tmp_path: Path) -> None:
    make_tiny("noop", tmp_path)
    (tmp_path / "saggar.json").write_text('{"params": {"sharpness": {"default": 3}}}')
    with pytest.raises(LoadError, match="no parameter 'sharpness'"):
        open_family(str(tmp_path))


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"executor": "thread"}, "executor must be one of multiproc, local, not 'thread'"),
        ({"mode": "x"}, "mode must be one of request_batch, step_batch"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"pixels": "float64"}, "pixels must be one of"),
        ({"device": "tpu"}, "device must be auto, cpu, cuda or cuda:N"),
        ({"max_batch": 0}, "max_batch must be at least 1"),
        ({"max_cost": 0}, "max_cost must be at least 1 or None"),
        ({"threads": 0}, "threads must be at least 1 or None"),
        ({"decode_rows": 0}, "decode_rows must be at least 1"),
        ({"pass_limit": 0}, "pass_limit must be at least 1"),
        ({"admission_wait_s": -1.0}, "admission_wait_s must be 0 or more"),
        ({"reservation_hold_s": float("nan")}, "reservation_hold_s must be 0 or more"),
        ({"ageing_s": 0.0}, "ageing_s must be above 0"),
    ],
)
def test_a_configuration_is_checked_at_construction(setting: dict[str, Any], says: str) -> None:
    with pytest.raises(Unsupported, match=says):
        EngineConfig(model="x", **setting)


def test_all_errors_hang_on_one_tree() -> None:
    from saggar import engine

    kinds = [
        value for value in vars(engine).values() if isinstance(value, type) and issubclass(value, Exception)
    ]
    assert len(kinds) == 10
    assert all(issubclass(kind, EngineError) for kind in kinds)
