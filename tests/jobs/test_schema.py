"""A job's own fields: what is accepted, kept, compared."""

from __future__ import annotations

import json
import pickle

import pytest
from pydantic import ValidationError
from saggar.jobs import Conflict, InvalidJob, Job, QueueFull, UnknownJob, parse_job
from saggar.jobs.schema import MAX_SEED

from tests.jobs.samples import make_job


def test_every_field_survives_json() -> None:
    job = make_job(
        id="job-1",
        task="i2i",
        negative_prompt="",
        params={"steps": 0, "flag": False, "none": None, "list": [1, 2.5, "x", None, True]},
        seed=0,
        num_outputs=3,
        inputs={"image": ["s3://bucket/a b".replace(" ", "_")], "mask": ["file:///data/m.png"]},
        loras=[{"name": "style/ink", "scale": -0.5}],
        output={"format": "webp", "quality": 1, "prefix": "runs/a=1"},
        priority="interactive",
        deadline="2030-01-02T03:04:05.678901+02:00",
        not_before="2030-01-01T00:00:00Z",
        tags=["a", "b:c/d=e"],
        tenant="t",
        run="r",
        idempotency_key="k#1",
        allow_unserved=True,
    )
    assert Job.model_validate_json(job.to_json()) == job
    assert parse_job(json.loads(job.to_json())) == job
    assert set(json.loads(job.to_json())) == set(Job.model_fields) - {"version"}


def test_zero_and_empty_are_values() -> None:
    job = make_job(prompt="", negative_prompt="", seed=0)
    again = Job.model_validate_json(job.to_json())
    assert (again.prompt, again.negative_prompt, again.seed) == ("", "", 0)


def test_the_highest_seed() -> None:
    assert make_job(seed=MAX_SEED).seed == 2**63 - 1
    assert make_job(seed=MAX_SEED - 3, num_outputs=4).seed == 2**63 - 4


def test_jobs_are_frozen_and_share_nothing_with_the_caller() -> None:
    params = {"steps": 1}
    job = make_job(params=params)
    params["steps"] = 2
    assert job.params == {"steps": 1}
    with pytest.raises(ValidationError):
        job.prompt = "other"  # type: ignore[misc]


def test_the_digest_is_of_the_work_not_of_the_id() -> None:
    job = make_job(id="a", params={"steps": 1, "height": 16})
    assert job.digest() == make_job(id="b", params={"height": 16, "steps": 1}).digest()
    assert job.digest() == make_job(id="a", params={"steps": 1, "height": 16}, priority="bulk").digest()
    for change in ({"seed": 2}, {"seed": None}, {"prompt": "a dog"}, {"tags": ["x"]}, {"params": {}}):
        assert make_job(**{"params": {"steps": 1, "height": 16}, **change}).digest() != job.digest()


def test_ids_are_made_when_not_given() -> None:
    assert make_job().id != make_job().id


def test_what_people_ask_for_is_not_in_the_repr() -> None:
    assert "secret" not in repr(make_job(prompt="secret", negative_prompt="secret"))


@pytest.mark.parametrize(
    "error",
    [InvalidJob("a.b", "is bad", "x"), Conflict("id", "j"), QueueFull("gen.x", 9, 2.5), UnknownJob("j")],
)
def test_errors_travel_between_processes(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_jobs_without_files_share_inputs_that_nobody_can_change() -> None:
    assert make_job().inputs is make_job().inputs
    assert hash(make_job(inputs={"image": ["s3://b/k"]}).inputs), "as nothing in it can be"


@pytest.mark.parametrize("uris", ["s3://b/k", {"s3://b/k"}, None, {"s3://b/k": 1}])
def test_uris_are_a_list(uris: object) -> None:
    with pytest.raises(InvalidJob, match=r"inputs.image: has the wrong type \(allowed: a list\)"):
        make_job(inputs={"image": uris})
