"""What two packages say twice, since neither may import the other, is the same: batch keys and parameters' rules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from saggar.engine.errors import InvalidRequest, LoadError
from saggar.engine.models.inputs import blank
from saggar.engine.models.registry import AnyFamily, open_family
from saggar.engine.models.tiny import make_tiny, tiny_models
from saggar.engine.params import check_params, check_schema
from saggar.jobs.cards import ModelCard, batch_key, check_job
from saggar.jobs.errors import InvalidCard, InvalidJob
from saggar.jobs.params import ParamsChecker
from saggar.jobs.schema import Job
from saggar.workers.translate import to_card, to_request

Models = Callable[[str], Path]
FAMILIES = (*tiny_models(), "saggar/emoji")
SPREAD: dict[str, list[dict[str, Any]]] = {
    "longcat-image-edit": [{"reference_pixels": 1024}, {"num_inference_steps": 3}],
    "qwen-image-layered": [{"layers": 3}, {"true_cfg_scale": 2}],
    "noop": [{"height": 8, "width": 9, "key": 'ä "quoted" \\ \n'}, {"guidance_scale": 7, "steps": 1}],
    "diffusion": [
        {"height": 128},
        {"num_inference_steps": 3},
        {"guidance_scale": 2},
        {"guidance_scale": 0.1 + 0.2},
    ],
    "hunyuan-video15-i2v": [{"num_frames": 9}, {"guidance_scale": 2}],
    "stable-audio": [{"guidance_scale": 2}, {"audio_end_in_s": None, "audio_start_in_s": 0.1}],
}
"""Beside the defaults: unlike order and types, text that JSON must escape, whole numbers for fractions."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("contract-models")

    def model(name: str) -> Path:
        path = folder / name
        return path if path.exists() else make_tiny(name, path)

    return model


def opened(name: str, models: Models) -> tuple[AnyFamily, ModelCard]:
    family = open_family(name if "/" in name else str(models(name)))
    return family, to_card(family.info(name, 8), name, 8)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checked_job_has_one_batch_key(name: str, models: Models) -> None:
    family, card = opened(name, models)
    spread = SPREAD.get(name) or SPREAD["noop" if name.startswith("noop") else "diffusion"]
    task, seen = card.tasks[0], set()
    files = blank(family.inputs_of(task), (64, 64))
    named = {kind: ["s3://bucket/a"] * len(media) for kind, media in files.items()}
    for params in [{}, *spread]:
        own = {_own_name(key, family): value for key, value in params.items()}
        given = Job.model_validate(
            {"id": "j", "model": name, "task": task, "prompt": "a jar", "params": own, "inputs": named}
        )
        job = check_job(given, card)
        request = family.validate(to_request(job, files))
        # The sizes of its files are known to the engine alone.
        assert family.batch_key(request).startswith(batch_key(job, card))
        assert dict(request.params) == job.params, "what was checked passes as it is, complete"
        assert "loras" not in json.loads(batch_key(job, card))
        assert json.loads(batch_key(job, card)).keys() == {"task", *card.batch_fields}
        seen.add(batch_key(job, card))
    assert (len(seen) > 1) == bool(card.batch_fields)


def _own_name(key: str, family: AnyFamily) -> str:
    known = family.schema["properties"]
    assert isinstance(known, dict)
    return "true_cfg_scale" if key == "guidance_scale" and key not in known else key


def jobs_takes(words: dict[str, Any], value: Any) -> bool:
    checker = ParamsChecker.from_schema(schema(words))
    try:
        checker.check({"p": value})
    except InvalidJob:
        return False
    return True


def engine_takes(words: dict[str, Any], value: Any) -> bool:
    check_schema(schema(words))
    try:
        check_params({"p": value}, schema(words))
    except InvalidRequest:
        return False
    return True


def schema(words: dict[str, Any]) -> Any:
    return {"type": "object", "properties": {"p": words}, "additionalProperties": False}


NUMBER_OR_NULL = {"anyOf": [{"type": "number", "minimum": 0}, {"type": "null"}]}
NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("words", "good", "bad"),
    [
        ({"type": "integer"}, [0, -1, 10**30], [1.0, True, "1", None, [1]]),
        ({"type": "number"}, [0, 1.5, -1], [True, "1", None, NAN, INFINITE, 10**400]),
        ({"type": "string"}, ["", "a", "ä"], [1, None, True, ["a"]]),
        ({"type": "boolean"}, [True, False], [0, 1, "true", None]),
        ({"type": "null"}, [None], [0, "", False]),
        ({"type": "array"}, [[], [1, "a", None, True, 0.5]], ["a", None, [[1]], [{}], {}]),
        ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"], [1, True], [1.0], [None]]),
        ({"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}}, [[1, 0.5]], [[1, 0]]),
        ({"type": "array", "minItems": 1, "maxItems": 2}, [[1], ["a", 2]], [[], [1, 2, 3]]),
        ({"type": "boolean", "enum": [False]}, [False], [True, None]),
        ({"type": "integer", "minimum": 2}, [2, 3], [1]),
        ({"type": "integer", "maximum": 2}, [2, 1], [3]),
        ({"type": "number", "exclusiveMinimum": 2}, [2.001, 3], [2, 2.0]),
        ({"type": "number", "exclusiveMaximum": 2}, [1, 1.999], [2, 2.0]),
        ({"type": "number", "minimum": 0, "exclusiveMaximum": 1}, [0, 0.5], [-0.1, 1]),
        ({"type": "integer", "multipleOf": 8}, [0, 8, -16], [1, 12]),
        ({"type": "number", "multipleOf": 0.1}, [0.3, 0.7, 1, 0], [0.35, 0.05]),
        ({"type": "string", "enum": ["a", ""]}, ["a", ""], ["b", None, 1]),
        ({"type": "integer", "enum": [256, 512]}, [256], [255, "256", None]),
        ({"enum": ["a", None, 2]}, ["a", None, 2], ["b", 3]),
        ({"type": "string", "const": "a"}, ["a"], ["b", ""]),
        (NUMBER_OR_NULL, [None, 0, 1.5], [-1, "1", True, NAN]),
        ({"type": "integer", "default": 3, "title": "T", "description": "D"}, [1], ["1"]),
    ],
)
def test_both_checkers_take_the_same_values(words: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert (jobs_takes(words, value), engine_takes(words, value)) == (True, True), value
    for value in bad:
        assert (jobs_takes(words, value), engine_takes(words, value)) == (False, False), value


def test_a_choice_that_is_equal_but_of_another_type_reaches_the_engine_as_the_choice() -> None:
    words = {"type": "integer", "enum": [1, 512]}
    for value in (True, 512.0):
        checked = ParamsChecker.from_schema(schema(words)).check({"p": value})
        assert type(checked["p"]) is int
        assert check_params(checked, schema(words)) == checked


@pytest.mark.parametrize(
    "words",
    [
        {"type": "integer", "dependentRequired": 1},
        {"type": "object"},
        {"type": "integer", "default": "a"},
        {"type": "integer", "maximum": 5, "default": 6},
        {**NUMBER_OR_NULL, "maximum": 1},
        {},
    ],
)
def test_both_refuse_a_schema_with_a_rule_that_they_would_not_apply(words: dict[str, Any]) -> None:
    with pytest.raises(InvalidCard):
        ParamsChecker.from_schema(schema(words))
    with pytest.raises(LoadError):
        check_schema(schema(words))


@pytest.mark.parametrize(
    "words",
    [
        {"type": "string", "minLength": 1},
        {"type": "string", "maxLength": 1},
        {"type": "string", "pattern": "^a"},
        {"type": "string", "minItems": 1},
        {"type": "array", "items": {"type": "string", "pattern": "^a"}},
        {"type": "string", "minimum": 1},
        {"type": "integer", "minimum": 5, "enum": [4, 6]},
        {"type": ["integer", "null"]},
        {"oneOf": [{"type": "integer"}, {"type": "null"}]},
        {"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]},
        {"$ref": "#/$defs/Kind"},
    ],
)
def test_the_engine_publishes_no_rule_that_it_does_not_apply(words: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match="parameter p: "):
        check_schema(schema(words))
