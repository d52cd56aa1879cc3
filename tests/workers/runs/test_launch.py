"""A manifest becomes a run: begun, found again, extended, adopted, or refused, and nothing is lost in between."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakeredis
import pytest
import redis
from saggar.jobs.errors import RunBusy, RunChanged
from saggar.jobs.runs import Run, RunLedger, RunSpec
from saggar.storage.base import Storage, open_storage
from saggar.storage.errors import Conflict
from saggar.workers.runs.folder import PART_ROWS, RunFolder, RunIndex
from saggar.workers.runs.launch import Flags, estimate, register
from saggar.workers.runs.manifest import Manifest
from saggar.workers.runs.readers import Columns

from tests.jobs.samples import CARD, MODEL, SETTINGS

NAME = "cats"


class Desk:
    """`plan(count)` registers a manifest of so many rows."""

    def __init__(self, client: redis.Redis, folder: Path) -> None:
        self.path = folder
        self.runs = RunLedger(client, SETTINGS)
        self.storage: Storage = open_storage(str(folder / "out"))

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.storage, NAME)

    def plan(self, *prompts: str, extend: bool = False, **values: object) -> Run:
        file = self.path / "p.jsonl"
        file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        with Manifest() as manifest:
            manifest.read(file, Flags().expansion(NAME, MODEL), Columns(), lambda _: CARD)
            spec = RunSpec.model_validate(
                {
                    "name": NAME,
                    "target": self.storage.url,
                    "model": MODEL,
                    "digest": manifest.digest,
                    "planned": manifest.planned,
                    **values,
                }
            )
            return register(self.runs, self.folder, manifest, spec, extend=extend)

    def prompts(self) -> list[str]:
        return [job.prompt for _, job in self.folder.rows(0)]


@pytest.fixture
def client() -> Iterator[redis.Redis]:
    with fakeredis.FakeRedis(decode_responses=True) as client:
        yield client


@pytest.fixture
def desk(client: redis.Redis, tmp_path: Path) -> Desk:
    return Desk(client, tmp_path)


def test_a_run_is_planned_beside_its_output(desk: Desk) -> None:
    run = desk.plan("a", "b", "a")
    assert (run.planned, run.state, run.settled) == (2, "planned", 0)
    assert desk.prompts() == ["a", "b"]
    assert desk.runs.rows(NAME, 0, 10) == ".."


def test_prompts_of_every_kind_of_line_come_back(desk: Desk) -> None:
    strange = ["a\u2028b", "c\u0085d", 'e"\\n', "f\x1cg", "ü" * 50]
    desk.plan(*strange)
    assert desk.prompts() == strange


def test_a_plan_lies_in_parts_and_is_read_from_anywhere(desk: Desk) -> None:
    count = PART_ROWS * 2 + 5
    desk.plan(*(f"p{n}" for n in range(count)))
    index = desk.folder.index()
    assert index is not None
    assert [part.count for part in index.parts] == [PART_ROWS, PART_ROWS, 5]
    n, job = next(desk.folder.rows(PART_ROWS + 7))
    assert (n, job.prompt) == (PART_ROWS + 7, f"p{PART_ROWS + 7}")
    assert list(desk.folder.rows(count)) == []
    desk.storage.put(index.parts[1].key, b"{}\n", content_type="text/plain")
    with pytest.raises(Conflict, match="other bytes"):
        list(desk.folder.rows(0))


def test_the_same_rows_in_another_order_are_the_same_run(desk: Desk) -> None:
    desk.plan("a", "b")
    assert desk.plan("b", "a").planned == 2
    assert desk.prompts() == ["a", "b"]


def test_another_manifest_target_or_way_is_refused(desk: Desk, tmp_path: Path) -> None:
    desk.plan("a", "b")
    with pytest.raises(RunChanged, match="another manifest"):
        desk.plan("a", "c")
    with pytest.raises(RunChanged, match="with format objects, not parquet"):
        desk.plan("a", "b", format="parquet")
    with pytest.raises(RunChanged, match="with gates none, not black"):
        desk.plan("a", "b", gates=["black"])
    assert desk.plan("a", "b", window=7, max_failures=3).spec.window == 7
    desk.storage = open_storage(str(tmp_path / "elsewhere"))
    with pytest.raises(RunChanged, match="writes to"):
        desk.plan("a", "b")
    assert desk.runs.get(NAME).planned == 2


def test_a_plan_that_is_gone_is_told(desk: Desk) -> None:
    desk.plan("a")
    desk.storage.delete([info.key for info in desk.storage.list("")])
    with pytest.raises(RunChanged, match="its plan is gone"):
        desk.plan("a")


def test_only_what_is_new_is_added_and_touched_rows_are_new(desk: Desk) -> None:
    desk.plan("a", "b")
    run = desk.plan("a", "changed", "c", extend=True)
    assert (run.planned, run.cursor) == (4, 0)
    assert desk.prompts() == ["a", "b", "changed", "c"]
    assert desk.plan("c", "a", extend=True).planned == 4, "nothing new"
    assert desk.plan("a", "b", "changed", "c").planned == 4, "the whole file is the run's manifest now"


def test_an_extension_that_was_broken_off_is_made_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.plan("a")

    def broken(*_: object) -> None:
        raise redis.ConnectionError

    with monkeypatch.context() as patch:
        patch.setattr(RunLedger, "extend", broken)
        with pytest.raises(redis.ConnectionError):
            desk.plan("a", "x", extend=True)
    assert desk.runs.get(NAME).planned == 1
    assert desk.plan("a", "b", "c", extend=True).planned == 3
    assert desk.prompts() == ["a", "b", "c"]
    assert parts_of(desk) == named(desk), "what was broken off has left nothing"


def test_a_run_that_somebody_controls_is_not_extended(desk: Desk) -> None:
    desk.plan("a")
    assert desk.runs.claim(NAME, "somebody")
    with pytest.raises(RunBusy):
        desk.plan("a", "b", extend=True)
    assert desk.prompts() == ["a"]


def parts_of(desk: Desk) -> list[str]:
    return sorted(info.key for info in desk.storage.list(f"_runs/{NAME}/manifest/"))


def named(desk: Desk) -> list[str]:
    index = desk.folder.index()
    assert index is not None
    return [part.key for part in index.parts]


def test_two_who_plan_one_name_at_a_time_do_not_mix(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins and ends between the first one's look for a plan and its writing of one."""
    look = RunFolder.index

    def late(folder: RunFolder, *, fresh: bool = False) -> RunIndex | None:
        found = look(folder, fresh=fresh)
        monkeypatch.setattr(RunFolder, "index", look)
        assert desk.plan("b1", "b2", "b3").planned == 3
        return found

    monkeypatch.setattr(RunFolder, "index", late)
    with pytest.raises(RunChanged, match="by somebody else at this moment"):
        desk.plan("a1", "a2")
    index = desk.folder.index()
    assert index is not None
    assert index.spec.digest == desk.runs.get(NAME).digest
    assert desk.prompts() == ["b1", "b2", "b3"]
    assert parts_of(desk) == named(desk)


@pytest.mark.parametrize("same", [True, False])
def test_two_extensions_at_a_time_do_not_mix(desk: Desk, monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    desk.plan("a")
    write = RunFolder.write_plan

    def late(*args: Any, **named: Any) -> RunIndex:
        monkeypatch.setattr(RunFolder, "write_plan", write)
        with pytest.raises(RunBusy, match="controlled by somebody"):
            desk.plan("a", *("b" if same else "x"), extend=True)
        return write(*args, **named)

    monkeypatch.setattr(RunFolder, "write_plan", late)
    assert desk.plan("a", "b", "c", extend=True).planned == 3
    assert desk.plan("a", "d", extend=True).planned == 4
    assert desk.prompts() == ["a", "b", "c", "d"]
    assert parts_of(desk) == named(desk)


def test_an_extension_whose_lease_is_lost_is_one_line(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.plan("a")
    write = RunFolder.write_plan

    def slow(*args: Any, **named: Any) -> RunIndex:
        desk.runs.claim(NAME, "somebody", force=True)
        return write(*args, **named)

    monkeypatch.setattr(RunFolder, "write_plan", slow)
    with pytest.raises(RunBusy, match="controlled by somebody"):
        desk.plan("a", "b", extend=True)
    assert desk.runs.get(NAME).planned == 1


def test_a_target_that_an_older_queue_filled_is_adopted(desk: Desk, client: redis.Redis) -> None:
    desk.plan("a", "b", "c")
    made = next(job.id for _, job in desk.folder.rows(1))
    desk.storage.put(f"{made}/result.json", b"{}", content_type="application/json")
    client.flushall()
    run = desk.plan("a", "b", "c")
    assert (run.planned, run.done) == (3, 1)
    assert desk.runs.rows(NAME, 0, 3) == ".d."


def test_what_failed_or_was_stopped_goes_on(desk: Desk) -> None:
    desk.plan("a", "b")
    assert desk.runs.claim(NAME, "me")
    desk.runs.release(NAME, "me")
    assert desk.runs.change(NAME, "paused") == "paused"
    assert desk.plan("a", "b").state == "running"
    assert desk.runs.change(NAME, "cancelled") == "cancelled"
    assert desk.runs.void(NAME) == 2
    run = desk.plan("a", "b")
    assert (run.state, run.cancelled, run.waiting) == ("running", 0, 2)


def test_an_earlier_run_of_the_model_says_how_long(desk: Desk, client: redis.Redis) -> None:
    desk.plan("a")
    assert estimate(desk.runs, MODEL, 100) is None
    for field, value in (("spent", 10_000_000), ("batched", 20), ("done", 20), ("bytes", 4000)):
        client.hset(f"saggar:runs:{NAME}", field, value)
    found = estimate(desk.runs, MODEL, 100)
    assert found is not None
    assert (found.seconds, found.bytes) == (50, 20_000)
    assert estimate(desk.runs, "other", 100) is None
