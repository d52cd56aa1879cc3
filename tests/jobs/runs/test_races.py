"""What comes to a run at the wrong moment: other commands, other controllers, losses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import redis
from saggar.jobs.runs import KeepAll, LeaseLost, Run
from saggar.jobs.runs.listing import records_of, stop_jobs

from tests.jobs.runs.support import NAME, Bench
from tests.jobs.runs.test_controller import Picky
from tests.jobs.samples import make_job


def test_rows_that_are_asked_for_again_amid_the_queueing_are_not_passed_over(fake: redis.Redis) -> None:
    """`saggar runs retry` comes between a controller's look at the cursor and its moving of it."""
    bench = Bench(fake, 12, window=4)
    controller = bench.controller()
    for _ in range(3):
        controller.step(0)
        bench.work(fails=lambda job_id: job_id == "row-0")
    mark = controller.runs.mark

    def late(name: str, token: str, cursor: int, entries: Sequence[tuple[str, int]]) -> None:
        bench.runs.again(NAME, ["failed"])
        mark(name, token, cursor, entries)

    controller.runs.mark = late  # type: ignore[method-assign]
    bench.finish(controller)
    assert bench.counts() == (12, 0, 0, 0)


def test_a_row_that_is_put_back_as_its_run_ends_is_made(fake: redis.Redis) -> None:
    bench = Bench(fake, 3)
    controller = bench.controller()

    class Late(KeepAll):
        def complete(self, run: Run) -> None:
            if run.failed:
                controller.runs.get = lambda name: run  # type: ignore[method-assign]
                bench.runs.again(NAME, ["failed"])

    controller.finisher = Late()
    controller.step(0)
    bench.work(fails=lambda job_id: job_id == "row-1")
    for _ in range(3):
        controller.step(0)
    run = bench.runs.get(NAME)
    assert (run.state, run.complete) == ("running", False), "it is not done with a row that waits"
    bench.finish(bench.controller())
    assert bench.counts() == (3, 0, 0, 0)


def test_what_another_controller_queued_meanwhile_is_known_to_one_that_wakes(fake: redis.Redis) -> None:
    """The other one is gone again, so that the lease is free: nothing else says that anything happened."""
    bench = Bench(fake, 20, window=4)
    sleeper = bench.controller()
    sleeper.step(0)
    bench.work()
    other = bench.controller()
    other.step(0)
    other.runs.release(NAME, other.token)
    bench.work()
    bench.finish(sleeper)
    assert bench.counts() == (20, 0, 0, 0)
    assert len(bench.made) == len(set(bench.made)) == 20


def test_a_row_that_failed_in_a_later_draw_is_tried_again(fake: redis.Redis) -> None:
    bench = Bench(fake, 2)
    bench.finish(bench.controller(Picky()), lambda job_id: job_id == "row-1-r1")
    assert bench.counts() == (1, 1, 0, 0)
    before = bench.runs.get(NAME)
    assert bench.runs.again(NAME, ["failed"]) == 1
    bench.finish(bench.controller(Picky()))
    run = bench.runs.get(NAME)
    assert bench.counts() == (2, 0, 0, 0)
    assert sorted(bench.made) == ["row-0", "row-1", "row-1-r1"], "what had succeeded is not made twice"
    assert (before.redrawn, run.redrawn, run.batched) == (1, 1, 2), "nor counted"


def test_what_is_lost_and_made_again_is_counted_once(fake: redis.Redis) -> None:
    class Packs(KeepAll):
        needs_records = True

    bench = Bench(fake, 6)
    controller = bench.controller(Packs())
    bench.finish(controller)
    before, tallies, pace = bench.runs.get(NAME), bench.runs.tallies(NAME), bench.runs.pace(NAME)
    assert (before.pictures, before.bytes, before.batched, before.batches) == (6, 54, 6, 3.0)
    assert bench.runs.reopen(NAME)
    assert bench.runs.pack(NAME, controller.token, [2, 3, 4], ".") == [2, 3, 4]
    lost = bench.runs.get(NAME)
    assert (lost.pictures, lost.bytes, lost.batched, lost.batches, lost.done) == (3, 27, 3, 1.5, 3)
    bench.runs.pack(NAME, controller.token, [0, 1])
    controller.resync()
    bench.finish(controller)
    after = bench.runs.get(NAME)
    assert (after.pictures, after.bytes, after.batched, after.batches) == (6, 54, 6, 3.0)
    assert bench.runs.tallies(NAME) == tallies
    assert sum(count for _, count in bench.runs.pace(NAME)) == sum(count for _, count in pace) == 6


def test_asking_for_rejected_rows_again_leaves_the_failures_of_others(fake: redis.Redis) -> None:
    bench = Bench(fake, 40, window=7)
    bench.finish(bench.controller(Picky()), lambda job_id: job_id in ("row-2", "row-4"))
    assert bench.counts() == (34, 2, 4, 0)
    assert bench.runs.again(NAME, ["rejected"]) == 4
    kinds, wrong = bench.runs.failures(NAME)
    assert (kinds, sorted(wrong)) == ({"row_failed": 2}, [2, 4])
    bench.finish(bench.controller(Picky()))
    assert bench.counts() == (34, 2, 4, 0)
    assert bench.runs.again(NAME, ["failed"]) == 2
    kinds, wrong = bench.runs.failures(NAME)
    assert (kinds, sorted(wrong)) == ({"rejected": 4}, [9, 19, 29, 39])


def test_too_many_failures_do_not_pause_a_run_that_is_complete(fake: redis.Redis) -> None:
    bench = Bench(fake, 4, max_failures=2)
    bench.finish(bench.controller(), lambda _: True)
    assert (bench.runs.get(NAME).state, bench.counts()) == ("done", (0, 4, 0, 0))


def test_what_runs_when_a_run_is_paused_is_told_when_it_is_cancelled(fake: redis.Redis) -> None:
    bench = Bench(fake, 4)
    controller = bench.controller()
    controller.step(0)
    assert bench.ledger.start("row-3", "worker-1")
    bench.runs.change(NAME, "paused")
    controller.step(0)
    bench.runs.change(NAME, "cancelled")
    controller.step(0)
    assert bench.client.status("row-3").cancel_requested


def test_all_pages_of_a_runs_jobs_are_stopped(fake: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saggar.jobs.runs.listing._PAGE", 2)
    bench = Bench(fake, 7)
    list(bench.client.submit_many([*bench.plan.jobs, make_job(id="other")]))
    assert bench.ledger.start("row-3", "worker-1")
    assert len(list(records_of(bench.client, NAME, "queued", "running"))) == 7
    assert stop_jobs(bench.client, NAME) == {f"row-{n}" for n in range(7)}
    assert bench.client.status("row-3").cancel_requested
    assert [record.id for record in bench.client.list(state="queued").records] == ["other"]


def test_jobs_that_no_row_waits_for_end_with_a_cancelled_run(fake: redis.Redis) -> None:
    """Of a controller that was killed when it had queued them."""
    bench = Bench(fake, 6, window=3)
    bench.controller().step(0)
    list(bench.client.submit_many(bench.plan.jobs[3:5]))
    bench.runs.change(NAME, "cancelled")
    bench.finish(bench.controller())
    run = bench.runs.get(NAME)
    assert (run.cancelled, run.closed) == (6, True)
    assert bench.client.counts()["queued"] == 0


def test_a_controller_without_the_run_pauses_and_forgets_nothing(fake: redis.Redis) -> None:
    bench = Bench(fake, 4)
    sleeper = bench.controller()
    bench.finish(sleeper)
    other = bench.controller()
    for call in (
        lambda: sleeper.runs.change(NAME, "paused", "late", token=sleeper.token),
        lambda: sleeper.runs.forget(NAME, ["row-1"], 10, token=sleeper.token),
        lambda: sleeper.runs.close(NAME, sleeper.token),
        sleeper.hold,
    ):
        with pytest.raises(LeaseLost):
            call()
    assert other.claim()
    assert (bench.runs.get(NAME).state, bench.client.counts()["succeeded"]) == ("done", 4)


def test_a_record_that_is_needed_again_is_not_forgotten(
    fake: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a row that failed, was asked for again, and waits to be packed."""

    class Packs(KeepAll):
        needs_records = True

    monkeypatch.setattr("saggar.jobs.runs.controller.KEPT", 0)
    bench = Bench(fake, 3)
    controller = bench.controller(Packs())
    monkeypatch.setattr(controller, "_forget", lambda: None)
    bench.finish(controller, lambda job_id: job_id == "row-1")
    bench.runs.again(NAME, ["failed"])
    bench.finish(controller)
    monkeypatch.undo()
    monkeypatch.setattr("saggar.jobs.runs.controller.KEPT", 0)
    controller._forget()
    assert len(bench.client.list(state="succeeded").records) == 3
