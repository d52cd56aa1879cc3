"""What comes last of a run: damaged leftovers, other runs beside it, an end that cannot be written, forgetting."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner
from saggar.jobs.errors import SaggarError
from saggar.jobs.record import JobRecord, JobResult, Times
from saggar.jobs.runs import RunSpec
from saggar.jobs.schema import Job
from saggar.storage.base import ObjectInfo
from saggar.storage.keys import result_key
from saggar.workers.commands.runs import runs
from saggar.workers.runs.drive import stands_still
from saggar.workers.runs.finish import staging
from saggar.workers.runs.judge import refused_draws
from saggar.workers.runs.keeper import RunKeeper
from saggar.workers.runs.outputs import Outputs

from tests.support.cluster import until
from tests.workers.runs.test_deaths import CASES, SHARDS, rows, small
from tests.workers.runs.trap import MemoryStore
from tests.workers.runs.world import NAME, Case, World

e2e = pytest.mark.e2e
_small = small
Begin = Callable[[Case], World]


@pytest.fixture
def begin(redis_url: str, tmp_path: Path) -> Iterator[Begin]:
    """A run that has been started, and nobody controls."""
    worlds: list[World] = []

    def begin(case: Case) -> World:
        worlds.append(World(case, redis_url, tmp_path))
        worlds[-1].start(case.rows)
        return worlds[-1]

    yield begin
    for world in worlds:
        world.close()


def first_draw(world: World, prompt: str) -> str:
    """Where the result of a row's first draw is."""
    found = [
        record for record in world.client.list(run=NAME, limit=1000).records if record.job.prompt == prompt
    ]
    (job_id,) = {record.id.partition("-r")[0] for record in found}
    return result_key("", job_id)


@e2e
def test_a_damaged_result_of_a_refused_draw_keeps_no_run_from_its_end(
    begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    """It stays where it is: nothing says which objects are its."""
    world = begin(CASES["at home"])
    world.finish()
    key = first_draw(world, "p1")  # refused: its seed is odd
    assert key not in world.target.objects
    world.target.objects[key] = b"junk"
    assert world.runs.reopen(NAME)
    world.finish()
    assert world.runs.get(NAME).state == "done"
    assert world.target.objects[key] == b"junk"
    assert "a refused draw is not removed" in caplog.text


@e2e
def test_the_end_of_a_run_with_gates_looks_at_nothing_of_others(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saggar.workers.runs.finish._ROWS", 2)
    world = begin(CASES["at home"])
    world.finish()
    before = dict(world.target.objects)
    refused, counts = (first_draw(world, prompt).split("/")[0] for prompt in ("p1", "p0"))
    for key in [key for key in before if key.startswith(f"{counts}/")]:
        # As whoever refused it left it when he was killed.
        left = before[key].replace(counts.encode(), refused.encode())
        world.target.objects[key.replace(counts, refused)] = left
    assert f"{refused}/result.json" in world.target.objects and f"{refused}/result.json" not in before
    world.target.objects["other/result.json"] = b"somebody's"
    listed: list[str] = []
    whole = MemoryStore.list

    def noted(self: MemoryStore, prefix: str) -> Iterator[ObjectInfo]:
        listed.append(prefix)
        return whole(self, prefix)

    monkeypatch.setattr(MemoryStore, "list", noted)
    assert world.runs.reopen(NAME)
    world.finish()
    assert listed and all(prefix.startswith(f"_runs/{NAME}/") for prefix in listed)
    ours = set(world.target.objects) - {"other/result.json"}
    assert ours == set(before)
    assert world.target.objects["other/result.json"] == b"somebody's"


def test_draws_that_do_not_count() -> None:
    assert list(refused_draws("a", "2.0=x", "d", 8)) == ["a", "a-r1"]
    assert list(refused_draws("a", "0.0=x,2.1=y", "d", 8)) == ["a-r1"]
    assert list(refused_draws("a", None, "d", 8)) == []
    assert list(refused_draws("a", "", "r", 2)) == ["a", "a-r1", "a-r2"]
    for letter in ".qfcp":
        assert list(refused_draws("a", "1.0=x", letter, 2)) == []


@e2e
def test_a_cancelled_run_whose_end_cannot_be_written_is_given_up(
    begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker cannot open its target: the next look must not take it up again. Nobody calls it paused."""
    world = begin(CASES["plain"])
    world.runs.change(NAME, "cancelled", "by hand")
    assert not stands_still(world.runs.get(NAME))
    with caplog.at_level(logging.ERROR):
        keeper = RunKeeper(world.settings, 0.01)
        until(lambda: stands_still(world.runs.get(NAME)), what="a run that is given up")
        keeper.close()
    run = world.runs.get(NAME)
    assert (run.state, run.closed, run.held) == ("cancelled", True, False)
    said = [one.getMessage() for one in caplog.records if one.name.endswith("keeper")]
    assert len(said) == 1 and "is cancelled, and its report could not be written" in said[0]


@e2e
def test_a_run_that_cannot_be_controlled_is_paused(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    world = begin(CASES["plain"])
    keeper = RunKeeper(world.settings, 0.01)
    until(lambda: world.runs.get(NAME).state == "paused", what="a paused run")
    keeper.close()
    assert f"run {NAME} is paused: " in caplog.text


@e2e
def test_an_older_plan_over_a_newer_one_is_told_and_made_good(begin: Begin) -> None:
    """As a controller leaves it that slept exactly as it wrote it: forgotten, the run is extended anew."""
    world = begin(Case(rows=rows(5), spec=SHARDS))
    world.finish()
    older, key = world.target.objects[f"_runs/{NAME}/run.json"], f"_runs/{NAME}/run.json"
    longer = [*rows(5), *rows(4, 10)]
    world.start(longer, extend=True)
    world.target.objects[key] = older
    with pytest.raises(SaggarError, match="row 5 is not there"):
        world.finish()
    world.redis.delete(f"saggar:runs:{NAME}:lease")  # it ends by itself
    assert world.runs.drop(NAME)
    world.start(longer, extend=True)
    world.finish()
    found = world.facts()
    assert (found["planned"], found["done"], found["findings"]) == (9, 9, [])
    assert set(world.made.values()) == {1}


@e2e
def test_the_jobs_of_a_forgotten_run_are_cancelled(begin: Begin, redis_url: str) -> None:
    """Its controller has died: nobody waits for them."""
    world = begin(Case(rows=rows(6), spec={**SHARDS, "window": 6}))
    world.live(most=1)
    (waiting, running, *_) = world.client.list(run=NAME, state="queued", limit=10).records
    assert world.begin(running)
    other = world.client.submit(Job(id="other", model=running.job.model, prompt="p", seed=1))
    command = ["forget", NAME, "--redis", redis_url]
    world.runs.claim(NAME, "somebody")
    assert CliRunner().invoke(runs, command).exit_code != 0
    assert world.client.status(waiting.id).state == "queued", "somebody holds it"
    world.runs.release(NAME, "somebody")
    done = CliRunner().invoke(runs, command)
    assert done.output == f"{NAME} forgotten, 3 jobs cancelled\n"
    assert world.client.status(waiting.id).state == "cancelled"
    assert world.client.status(running.id).cancel_requested
    assert world.client.status(other.id).state == "queued"


@pytest.mark.parametrize("form", ["objects", "webdataset"])
def test_only_what_is_the_runs_own_is_forgotten(form: str) -> None:
    """A record may name any key of any store."""
    store = MemoryStore("m")
    prefix = staging(NAME) if form != "objects" else ""
    spec = RunSpec.model_validate(
        {
            "name": NAME,
            "target": "t",
            "model": "m",
            "digest": "d",
            "planned": 1,
            "format": form,
            "prefix": prefix,
        }
    )
    own, foreign = ("j", NAME, prefix), ("j", "another" if form == "objects" else NAME, "elsewhere")
    for name, run, where in (foreign, own):
        key = result_key(where, name)
        store.objects[key] = b"{}"
        job = Job.model_validate(
            {"id": name, "model": "m", "prompt": "p", "run": run, "output": {"prefix": where}}
        )
        record = JobRecord(
            id=name,
            state="succeeded",
            job=job,
            digest="d",
            times=Times(submitted=datetime(2030, 1, 1, tzinfo=UTC)),
            result=JobResult(outputs=[], attempt=1, manifest=store.uri(key)),
        )
        Outputs({store.url: store}.__getitem__).forget(record, spec)
    assert list(store.objects) == [result_key("elsewhere", "j")]
