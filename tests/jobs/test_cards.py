"""Cards: rules from JSON Schema, defaults, the check across fields, the batch key, the registry."""

from __future__ import annotations

import json
import pickle

import pytest
import redis
from pydantic import ValidationError
from saggar.jobs import (
    Cards,
    InvalidCard,
    InvalidJob,
    Job,
    JobClient,
    ModelCard,
    Submitted,
    UnknownModel,
    batch_key,
    check_job,
)
from saggar.jobs.cards import completed
from saggar.jobs.params import ParamsChecker

from tests.jobs.samples import CARD, MODEL, SETTINGS, make_job


def test_defaults_are_filled_and_checking_again_changes_nothing() -> None:
    job = check_job(make_job(seed=None, params={"guidance": 0, "true_cfg": None}), CARD)
    assert job.params == {
        "guidance": 0.0,
        "height": 256,
        "sampler": "euler",
        "steps": 4,
        "tiling": False,
        "true_cfg": None,
        "width": 256,
    }
    assert job.output.format == "png"
    assert job.seed is not None
    assert 0 <= job.seed < 2**32
    assert check_job(job, CARD) == job


def test_a_given_seed_and_format_are_kept() -> None:
    job = check_job(make_job(seed=0, output={"format": "webp"}), CARD)
    assert (job.seed, job.output.format) == (0, "webp")


def test_a_default_is_brought_to_its_type() -> None:
    guidance = check_job(make_job(), CARD).params["guidance"]
    assert isinstance(guidance, float)
    assert guidance == 3.0


def test_rules_are_built_once_for_a_card_object() -> None:
    assert CARD.checker is CARD.checker
    schema = {"properties": {"height": {"type": "integer"}, "width": {"type": "integer"}}}
    other = CARD.model_copy(update={"params_schema": schema})
    assert other.checker.check({"height": 1}) == {"height": 1}  # a copy has rules of its own
    assert pickle.loads(pickle.dumps(CARD)) == CARD


@pytest.mark.parametrize("name", ["copy", "json", "model_config", "schema", "class", "_under"])
def test_any_name_may_be_a_parameter(name: str) -> None:
    checker = ParamsChecker.from_schema({"properties": {name: {"type": "integer", "default": 1}}})
    assert checker.check({}) == {name: 1}
    assert checker.check({name: 2}) == {name: 2}


def test_required_and_optional_parameters() -> None:
    schema = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}
    checker = ParamsChecker.from_schema(schema)
    assert checker.check({"a": 0}) == {"a": 0}
    with pytest.raises(InvalidJob, match=r"params.a: is required \(allowed: an integer\)"):
        checker.check({"b": ""})


def test_references_and_several_types() -> None:
    schema = {
        "$defs": {"Mode": {"enum": ["a", "b"]}},
        "properties": {
            "mode": {"$ref": "#/$defs/Mode", "default": "a"},
            "shift": {"type": ["number", "null"], "exclusiveMinimum": 0},
        },
    }
    checker = ParamsChecker.from_schema(schema)
    assert checker.check({"shift": None}) == {"mode": "a", "shift": None}
    with pytest.raises(InvalidJob, match=r"params.mode: .*\"a\", \"b\""):
        checker.check({"mode": "c"})
    with pytest.raises(InvalidJob, match=r"params.shift: 0 is too small \(allowed: a number or null, > 0\)"):
        checker.check({"shift": 0})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array"}, "must describe an object"),
        ({"properties": {"a": {"type": "object"}}}, "'object' is not supported"),
        ({"properties": {"a": {"type": "string", "minProperties": 1}}}, "'minProperties' is not supported"),
        ({"properties": {"a": {"$ref": "#/$defs/X"}}}, "'X' is not in"),
        (
            {"properties": {"a": {"type": "integer", "minimum": 3, "default": 1}}},
            "default of a: 1 is too small",
        ),
        ({"properties": {"a": {"type": "string", "pattern": "["}}}, "params_schema"),
        ({"properties": {}, "patternProperties": {}}, "'patternProperties' is not supported"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_refused(schema: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidCard, match=message):
        ParamsChecker.from_schema(schema)  # type: ignore[arg-type]


def test_batch_fields_must_exist() -> None:
    card = CARD.model_copy(update={"batch_fields": ["frames"]})
    with pytest.raises(InvalidCard, match="'frames' is not in params_schema"):
        _ = card.checker


def test_the_batch_key_is_canonical() -> None:
    job = check_job(make_job(params={"width": 512}), CARD)
    assert batch_key(job, CARD) == '{"height":256,"task":"t2i","width":512}'
    other = check_job(make_job(prompt="b", seed=9, params={"width": 512, "steps": 50}), CARD)
    assert batch_key(other, CARD) == batch_key(job, CARD)
    inked = CARD.model_copy(update={"loras": True})
    lora = check_job(make_job(loras=[{"name": "ink", "scale": 1}]), inked)
    assert json.loads(batch_key(lora, inked))["loras"] == [{"name": "ink", "scale": 1.0}]
    assert batch_key(make_job(), None) == '{"task":"t2i"}'


def test_cards_stay_when_their_worker_leaves(fake: redis.Redis) -> None:
    cards = Cards(fake, SETTINGS)
    assert cards.get(MODEL) is None
    cards.publish(CARD, "w1")
    cards.publish(CARD, "w2")
    assert cards.workers_of(MODEL) == ["w1", "w2"]
    cards.leave(MODEL, "w1")
    cards.leave(MODEL, "w2")
    assert cards.workers_of(MODEL) == []
    assert cards.get(MODEL) == CARD
    assert cards.list() == [CARD]


def test_a_card_is_forgotten(fake: redis.Redis, client: JobClient) -> None:
    cards = Cards(fake, SETTINGS)
    cards.publish(CARD, "w1")
    cards.forget(MODEL)
    assert (cards.list(), cards.workers_of(MODEL)) == ([], [])
    for refused in (lambda: cards.forget(MODEL), lambda: client.submit(make_job())):
        with pytest.raises(UnknownModel, match="no worker has served"):
            refused()


def test_a_card_of_a_newer_worker_is_read(fake: redis.Redis) -> None:
    fake.hset("saggar:cards", MODEL, json.dumps({**CARD.model_dump(mode="json"), "colour": "red"}))
    assert Cards(fake, SETTINGS).get(MODEL) == CARD
    with pytest.raises(ValidationError, match="colour"):  # what is published has no words of its own
        ModelCard.model_validate({**CARD.model_dump(), "colour": "red"})


def test_a_card_that_cannot_be_read_harms_its_own_model_alone(fake: redis.Redis, client: JobClient) -> None:
    fake.hset("saggar:cards", "odd", '{"model": "odd", "family": 1}')
    with pytest.raises(InvalidCard, match="family"):
        Cards(fake, SETTINGS).get("odd")
    assert Cards(fake, SETTINGS).list() == [CARD]
    jobs = [make_job(), make_job(model="odd"), make_job(model="none"), make_job()]
    outcomes = list(client.submit_many(jobs))
    assert [type(outcome) for outcome in outcomes] == [Submitted, InvalidCard, UnknownModel, Submitted]
    with pytest.raises(InvalidCard, match=r"^odd: family"):
        client.submit(jobs[1])


def test_a_job_without_a_card_gets_its_seed_all_the_same() -> None:
    job = make_job(seed=None)
    assert completed(job, None).seed is not None
    assert completed(job, CARD).params["height"] == 256


def test_a_card_is_refused_before_it_is_published(fake: redis.Redis) -> None:
    bad = ModelCard(model="m", family="f", tasks=["t2i"], params_schema={"type": "array"})
    with pytest.raises(InvalidCard):
        Cards(fake, SETTINGS).publish(bad, "w")
    assert not fake.keys()


def test_a_task_takes_so_many_files_of_a_kind() -> None:
    taken = CARD.model_copy(
        update={
            "tasks": ["t2i", "edit"],
            "inputs": ["image", "mask"],
            "task_inputs": {"edit": {"image": (1, 2)}},
        }
    )

    def job(task: str, **inputs: list[str]) -> Job:
        return make_job(task=task, inputs=inputs)

    one = "s3://bucket/a.png"
    assert check_job(job("edit", image=[one, one]), taken).inputs.image == (one, one)
    for task, field, inputs in (
        ("edit", "inputs.image", {}),
        ("edit", "inputs.image", {"image": [one] * 3}),
        ("edit", "inputs.mask", {"image": [one], "mask": [one]}),
        ("t2i", "inputs.image", {"image": [one]}),
    ):
        with pytest.raises(InvalidJob) as refused:
            check_job(job(task, **inputs), taken)
        assert refused.value.field == field


def test_a_parameter_of_another_task_is_refused() -> None:
    rule = {"type": "number", "default": 0.6, "x-tasks": ["i2i"]}
    checker = ParamsChecker.from_schema({"properties": {"strength": rule}})
    assert checker.check({}, "t2i") == checker.check({"strength": 0.6}, "t2i") == {"strength": 0.6}
    assert checker.check({"strength": 0.2}, "i2i") == {"strength": 0.2}
    with pytest.raises(InvalidJob, match=r"strength.*says nothing to t2i.*i2i"):
        checker.check({"strength": 0.2}, "t2i")


def test_a_task_may_have_defaults_of_its_own() -> None:
    rule = {"type": "number", "default": 3.5, "x-defaults": {"i2i": 7.0}}
    checker = ParamsChecker.from_schema({"properties": {"scale": rule}})
    assert checker.check({}, "t2i") == {"scale": 3.5}
    assert checker.check({}, "i2i") == {"scale": 7.0}
    assert checker.check({"scale": 3.5}, "i2i") == {"scale": 3.5}
    for wrong in ({"i2i": "much"}, "i2i"):
        with pytest.raises(InvalidCard, match="scale"):
            ParamsChecker.from_schema({"properties": {"scale": {**rule, "x-defaults": wrong}}})


def test_a_grid_may_be_shifted() -> None:
    rule = {"type": "integer", "default": 5, "minimum": 1, "multipleOf": 4, "x-offset": 1}
    checker = ParamsChecker.from_schema({"properties": {"frames": rule}})
    for frames in (1, 5, 81):
        assert checker.check({"frames": frames}) == {"frames": frames}
    with pytest.raises(InvalidJob, match=r"frames: 6 is off the grid .*a multiple of 4, and 1 more"):
        checker.check({"frames": 6})
    for wrong in ({"type": "number", "multipleOf": 4, "x-offset": 1}, {"type": "integer", "x-offset": 1}):
        with pytest.raises(InvalidCard, match="x-offset shifts the multipleOf of an integer"):
            ParamsChecker.from_schema({"properties": {"frames": wrong}})
