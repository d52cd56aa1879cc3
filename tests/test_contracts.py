"""What two packages must agree on and neither may import from the other."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from saggar.jobs.errors import InvalidJob
from saggar.jobs.schema import Job
from saggar.storage.errors import InvalidKey
from saggar.storage.keys import check_prefix, result_key

LETTERS = "aZ09_+=@,.~-/ \\é%"
LONGEST = 256  # of a job's prefix: room for the rest of a key


def taken_by_jobs(prefix: str) -> bool:
    try:
        Job.model_validate({"model": "m", "prompt": "p", "output": {"prefix": prefix}})
    except InvalidJob:
        return False
    return True


def taken_by_storage(prefix: str) -> bool:
    try:
        check_prefix(prefix)
    except InvalidKey:
        return False
    return True


@given(st.text(LETTERS, max_size=12))
@example("-x")
@example("~x")
@example("a/-b")
@example("a/.b")
@example("a//b")
@example("a,b~c-d.e")
@example("a" * 200)
@example("a" * 201)
@example("a/" + "b" * 201)
def test_a_prefix_that_a_job_may_have_is_one_that_the_store_takes(prefix: str) -> None:
    by_storage = taken_by_storage(prefix) and not prefix.endswith("/")
    assert taken_by_jobs(prefix) == by_storage


def test_the_longest_prefix_leaves_room_for_the_key() -> None:
    prefix = "/".join(["p" * 127] * 2)
    assert taken_by_jobs(prefix + "p")
    assert not taken_by_jobs(prefix + "pp")
    assert len(prefix + "p") == LONGEST
    result_key(prefix, "j" * 128)


@pytest.mark.parametrize("job_id", ["a", "0", "A.b_c-d", "x" * 128])
def test_a_jobs_id_is_a_part_of_a_key(job_id: str) -> None:
    assert Job(id=job_id, model="m", prompt="p").id == job_id
    assert result_key("", job_id) == f"{job_id}/result.json"
