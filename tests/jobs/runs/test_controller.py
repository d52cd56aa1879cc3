"""A run's rows come to their ends, each once, wherever its controller is killed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import redis
from saggar.jobs.runs import Controller, Ended, KeepAll, LeaseLost, Run, RunLedger, Verdict
from saggar.jobs.runs.contract import bytes_of
from saggar.jobs.runs.rows import draw_id, redrawn, row_of

from tests.jobs.runs.support import NAME, Bench, Crash, some
from tests.jobs.samples import SETTINGS, make_job


@pytest.mark.parametrize(("count", "window"), [(1, 1), (7, 3), (300, 40)])
def test_every_row_ends_once_and_the_window_is_never_exceeded(
    fake: redis.Redis, count: int, window: int
) -> None:
    bench = Bench(fake, count, window=window)
    controller = bench.controller()
    for _ in range(10_000):
        run = controller.step(0)
        assert run.open <= window
        assert len(bench.client.list(state="queued", limit=1000).records) <= window
        if run.state == "done":
            break
        bench.work(random.Random(count).randint(1, window))
    assert bench.counts() == (count, 0, 0, 0)
    assert sorted(bench.made) == sorted(job.id for job in bench.plan.jobs)
    assert (run.batched, run.bytes) == (count, 9 * count)
    assert run.ended is not None


def test_a_row_that_leads_to_another_rows_job_fails(fake: redis.Redis) -> None:
    """By a key of an older plan; the row would be queued and not found again, for ever."""
    bench = Bench(fake, 3)
    bench.plan.jobs[:2] = [make_job(id=f"row-{n}", run=NAME, seed=5, idempotency_key="k") for n in range(2)]
    bench.finish(bench.controller())
    assert bench.counts() == (2, 1, 0, 0)
    assert bench.runs.failures(NAME)[1][1].startswith(
        "refused: idempotency_key: job row-0 was submitted with it"
    )


def test_failures_are_counted_by_kind_and_made_again_on_request(fake: redis.Redis) -> None:
    bench = Bench(fake, 40, window=10)
    bench.finish(bench.controller(), some(1, 0.4))
    done, failed, *_ = bench.counts()
    assert done + failed == 40 and failed > 0
    kinds, wrong = bench.runs.failures(NAME)
    assert kinds == {"row_failed": failed}
    assert set(wrong.values()) == {"row_failed: asked to"}
    assert bench.runs.again(NAME, ["failed"]) == failed
    bench.finish(bench.controller())
    assert bench.counts() == (40, 0, 0, 0)
    assert len(bench.made) == len(set(bench.made)) == 40


def test_too_many_failures_pause_the_run_and_resuming_goes_on(fake: redis.Redis) -> None:
    bench = Bench(fake, 40, window=5, max_failures=3)
    bench.finish(bench.controller(), lambda _: True)
    run = bench.runs.get(NAME)
    assert (run.state, run.why) == ("paused", f"{run.failed} rows failed")
    assert 3 <= run.failed < 10
    assert run.waiting == 40 - run.failed


def test_time_that_is_spent_pauses_the_run(fake: redis.Redis) -> None:
    bench = Bench(fake, 40, window=5, time_budget_s=0.001)
    controller = bench.controller()
    controller.step(0)
    bench.finish(controller)
    run = bench.runs.get(NAME)
    assert (run.state, run.why) == ("paused", "its time of 0.001 s is spent")
    assert bench.runs.change(NAME, "running") == "running"
    assert bench.runs.get(NAME).round_s == 0, "resumed, it has its time again"


def test_a_paused_run_leaves_the_queue_but_for_what_runs(fake: redis.Redis) -> None:
    bench = Bench(fake, 20, window=10)
    controller = bench.controller()
    controller.step(0)
    attempt = bench.ledger.start("row-3", "worker-1").attempt  # type: ignore[union-attr]
    assert bench.runs.change(NAME, "paused", "by hand") == "paused"
    run = controller.step(0)
    assert run.open == 1 and bench.client.counts()["queued"] == 0
    from tests.jobs.samples import make_result

    bench.ledger.commit("row-3", attempt, make_result(attempt))
    run = controller.step(0)
    assert (run.done, run.open, run.cancelled) == (1, 0, 0)
    assert bench.runs.change(NAME, "running") == "running"
    bench.finish(controller)
    assert bench.counts() == (20, 0, 0, 0)
    assert sorted(bench.made) == sorted({job.id for job in bench.plan.jobs} - {"row-3"})


def test_a_cancelled_run_ends_every_row(fake: redis.Redis) -> None:
    bench = Bench(fake, 30, window=10)
    controller = bench.controller()
    controller.step(0)
    bench.work(4)
    controller.step(0)
    bench.runs.change(NAME, "cancelled")
    bench.finish(controller)
    run = bench.runs.get(NAME)
    assert (run.done, run.cancelled, run.state, run.complete) == (4, 26, "cancelled", True)
    assert bench.client.counts()["queued"] == 0
    assert bench.runs.again(NAME, ["cancelled"]) == 26
    bench.finish(bench.controller())
    assert bench.counts() == (30, 0, 0, 0)
    assert len(bench.made) == len(set(bench.made)) == 30


def test_one_job_that_somebody_cancels_is_a_cancelled_row(fake: redis.Redis) -> None:
    bench = Bench(fake, 5)
    controller = bench.controller()
    controller.step(0)
    bench.client.cancel("row-2")
    bench.finish(controller)
    assert bench.counts() == (4, 0, 0, 1)


@pytest.mark.parametrize("seed", range(10))
def test_it_goes_on_exactly_wherever_it_was_killed(fake: redis.Redis, seed: int) -> None:
    """A controller dies before or after a random command to Redis, again and again; others finish the run."""
    chance, count = random.Random(seed), 30
    bench = Bench(fake, count, window=chance.choice([3, 10, 100]))
    execute = fake.execute_command
    left = [0]

    def dying(*args: object, **kwargs: object) -> object:
        left[0] -= 1
        if left[0] == 0 and chance.random() < 0.5:
            raise Crash
        answer = execute(*args, **kwargs)
        if left[0] == 0:
            raise Crash
        return answer

    crashes = 0
    while bench.runs.get(NAME).state != "done":
        controller = bench.controller()
        assert controller.claim(force=True)
        left[0] = chance.randint(1, 40) if crashes < 12 else -1
        fake.execute_command = dying  # type: ignore[method-assign]
        try:
            for _ in range(chance.randint(1, 5)):
                controller.step(0)
        except Crash:
            crashes += 1
        finally:
            fake.execute_command = execute  # type: ignore[method-assign]
        bench.work(chance.randint(1, 20), some(seed, 0.1))
    done, failed, rejected, cancelled = bench.counts()
    assert (done + failed, rejected, cancelled) == (count, 0, 0)
    assert len(bench.made) == len(set(bench.made)) == done


def test_one_controller_at_a_time(fake: redis.Redis) -> None:
    bench = Bench(fake, 20, window=5)
    first = bench.controller()
    first.step(0)
    second = Controller(NAME, bench.client, fake, bench.plan)
    with pytest.raises(LeaseLost):
        second.step(0)
    assert second.claim(force=True)
    bench.work(2)
    with pytest.raises(LeaseLost):
        first.step(0)
    with pytest.raises(LeaseLost):
        first.runs.mark(NAME, first.token, 20, [("row-9", 9)])
    bench.finish(second)
    assert bench.counts() == (20, 0, 0, 0)


def test_an_end_whose_event_is_gone_is_read_from_the_record(fake: redis.Redis) -> None:
    bench = Bench(fake, 8)
    controller = bench.controller()
    controller.step(0)
    bench.work(7)
    fake.xtrim(f"saggar:events:run:{NAME}", maxlen=0, approximate=False)
    bench.work(1)
    run = controller.step(0)
    assert run.state == "done"


def test_records_of_settled_rows_leave_redis(fake: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saggar.jobs.runs.controller.KEPT", 10)
    bench = Bench(fake, 100, window=20)
    bench.finish(bench.controller())
    assert bench.client.counts()["succeeded"] == 10
    assert len(list(fake.scan_iter("saggar:job:*"))) == 10
    assert len(list(fake.scan_iter("celery-task-meta-*"))) == 10
    assert bench.counts() == (100, 0, 0, 0)


class Picky(KeepAll):
    """Rejects draws whose seed is odd; a row may cost two more."""

    def judge(self, ended: Sequence[Ended]) -> Sequence[Verdict]:
        return [self._one(one) for one in ended]

    def _one(self, one: Ended) -> Verdict:
        seed = one.record.job.seed
        assert seed is not None
        if one.n % 10 != 9 and seed % 2 == 0:
            return Verdict("done", picks=f"{one.draw}.0", bytes=bytes_of(one.record))
        return Verdict("redraw", picks="") if one.draw < 2 else Verdict("rejected", picks="", why="odd")


def test_a_rejected_draw_is_made_again_with_the_next_seed(fake: redis.Redis) -> None:
    bench = Bench(fake, 40, window=7)
    bench.finish(bench.controller(Picky()))
    run = bench.runs.get(NAME)
    assert (run.done, run.rejected, run.planned) == (36, 4, 40)
    assert run.redrawn == 16 + 4 * 2, "every odd seed once, and two draws of each that is never accepted"
    assert bench.runs.picks(NAME, [0, 1, 9]) == ["0.0", "1.0", ""]
    assert len(bench.made) == 40 + run.redrawn


def test_the_seeds_of_draws(fake: redis.Redis) -> None:
    job = make_job(id="row", seed=5, num_outputs=2)
    assert (redrawn(job, 0).id, redrawn(job, 0).seed) == ("row-r1", 7)
    assert (redrawn(redrawn(job, 0), 1).id, redrawn(redrawn(job, 0), 1).seed) == ("row-r2", 9)
    assert redrawn(job, 0, stride=10).seed == 15


@pytest.mark.parametrize("row", ["row", "row-r1", "a-r2-0123456789ab"])
def test_the_ids_of_draws(row: str) -> None:
    assert draw_id(row, 0) == row
    assert draw_id(row, 12) == f"{row}-r12"
    assert [row_of(draw_id(row, draw), draw) for draw in range(3)] == [row] * 3


def test_runs_are_listed_and_forgotten(fake: redis.Redis) -> None:
    bench = Bench(fake, 3)
    assert [run.name for run in bench.runs.list()] == [NAME]
    controller = bench.controller()
    controller.step(0)
    assert not bench.runs.drop(NAME), "somebody holds it"
    controller.runs.release(controller.name, controller.token)
    assert bench.runs.drop(NAME)
    assert list(RunLedger(fake, SETTINGS).list()) == []
    assert list(fake.scan_iter("saggar:runs*")) == []


def test_a_run_is_named_once(fake: redis.Redis) -> None:
    from saggar.jobs.errors import RunChanged

    bench = Bench(fake, 3)
    assert bench.runs.open(bench.spec.model_copy(update={"window": 9})) == "same"
    assert bench.runs.get(NAME).spec.window == 9
    with pytest.raises(RunChanged):
        bench.runs.open(bench.spec.model_copy(update={"digest": "d2"}))


def test_an_extended_run_makes_what_is_new(fake: redis.Redis) -> None:
    bench = Bench(fake, 5)
    bench.finish(bench.controller())
    controller = bench.controller()
    assert controller.claim(force=True)
    longer = Bench(fake, 5).plan.__class__(8)
    spec = bench.spec.model_copy(update={"digest": "d2", "planned": 8})
    for _ in range(2):  # sent twice
        controller.runs.extend(spec, controller.token, "d1", 3)
    controller.runs.release(controller.name, controller.token)
    bench.plan = longer
    bench.finish(bench.controller())
    assert bench.counts() == (8, 0, 0, 0)
    assert len(bench.made) == len(set(bench.made)) == 8


def test_done_rows_are_packed_in_letters(fake: redis.Redis) -> None:
    bench = Bench(fake, 6)
    controller = bench.controller()
    bench.finish(controller)
    controller.claim()
    assert list(bench.runs.rows_in(NAME, "d")) == list(range(6))
    assert bench.runs.pack(NAME, controller.token, [1, 4]) == [1, 4]
    assert bench.runs.rows(NAME, 0, 6) == "dpddpd"
    assert bench.runs.pack(NAME, controller.token, [0, 1, 6], ".") == [0], "what is in a shard stays there"
    assert bench.runs.rows(NAME, 0, 6) == ".pddpd"
    run: Run = bench.runs.get(NAME)
    assert (run.done, run.cursor) == (5, 0)
