"""A worker that dies at the worst moments: its jobs are done by others, and seen once."""

from __future__ import annotations

import signal
import time

import pytest
from saggar.jobs.lanes import celery_message
from saggar.jobs.ledger import TASK
from saggar.workers.app import make_app

from tests.support.cluster import until
from tests.support.site import LANE, Site, freeze, thaw

pytestmark = pytest.mark.e2e


def killed(child) -> bool:
    return child.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("how", "attempts"),
    [
        ("dies after claim", {1}),
        ("dies after start", {2}),
        ("dies after put", {2, 3}),  # 3: the ledger had not heard yet that nothing executes any more
        ("dies after manifest", {1}),  # what stands is what the first attempt wrote
        ("dies after commit", {1}),
    ],
)
def test_a_worker_killed_at_this_point_loses_nothing(s3_site: Site, how: str, attempts: set[int]) -> None:
    ids = s3_site.submit(1)
    assert killed(s3_site.sabotaged(how)), s3_site.logs()[-3000:]
    s3_site.worker()
    records = s3_site.wait(ids)
    assert records[0].result.attempt in attempts
    s3_site.check(records)
    s3_site.nothing_is_left()


@pytest.mark.parametrize(
    ("how", "taken_over", "made_again"),
    [
        ("dies after start", False, True),
        ("dies amid objects", False, True),
        ("dies after objects", False, True),
        ("dies amid manifests", True, True),
        ("dies after manifests", True, None),  # it may have had others in hand
        ("dies after records", None, None),
    ],
)
def test_a_worker_killed_amid_a_group_of_small_outputs_loses_nothing(
    site: Site, how: str, taken_over: bool | None, made_again: bool | None
) -> None:
    """Manifests that stand are taken over, and what has none is made again."""
    ids = site.submit(12)
    assert killed(site.sabotaged(how)), site.logs()[-3000:]
    site.worker()
    records = site.wait(ids)
    results = [(record.attempt, record.result.attempt) for record in records]
    assert taken_over in (None, any(made < last for last, made in results))
    assert made_again in (None, any(made > 1 for _, made in results))
    site.check(records)
    site.nothing_is_left()


def test_frozen_while_waiting_for_work_then_fed_then_killed(site: Site) -> None:
    worker = site.worker()
    site.serving(1)
    child = worker.child()
    freeze(child)
    ids = site.submit(12)
    worker.kill()
    site.worker()
    records = site.wait(ids)
    assert {record.attempt for record in records} == {1}
    site.check(records)
    site.nothing_is_left()


def test_redis_killed_between_the_ledgers_write_and_the_wake_up(site: Site) -> None:
    """The message is there, the bell was never heard."""
    site.worker()
    site.serving(1)
    freeze(site.children()[0])
    ids = site.submit(4)
    site.redis.kill()
    thaw(site.children()[0])
    site.redis.start()
    records = site.wait(ids)
    site.check(records)
    site.nothing_is_left()


def test_a_message_delivered_three_times_is_one_job(site: Site) -> None:
    """Copies wait beside the message, and come while the job runs and after its end."""
    (job_id,) = site.submit(1, params={"sleep_s": 0.1, "steps": 8})
    for _ in range(2):
        site.lane.put(celery_message(TASK, job_id, LANE, priority_class=2, batch_key="copy", rows=1))
    site.worker()
    site.worker()
    site.check(site.wait([job_id]))
    site.nothing_is_left()


@pytest.mark.parametrize("frozen_s", [0, pytest.param(90, marks=pytest.mark.soak)])
def test_a_worker_that_was_frozen_and_comes_back_is_fenced(site: Site, frozen_s: int) -> None:
    """Frozen until others have done its jobs, or longer."""
    ids = site.submit(2, params={"sleep_s": 0.5, "steps": 4})
    frozen = site.worker(SAGGAR_WATCHDOG_S="0")  # which would not leave it frozen for long
    until(lambda: all(site.client.status(job_id).progress for job_id in ids), 60)
    freeze(frozen.child())
    other = site.worker()
    records = site.wait(ids)
    time.sleep(frozen_s)
    thaw(frozen.child())
    until(lambda: all(f"[{job_id}] ignored" in frozen.log.read_text() for job_id in ids), 60)
    after = site.wait(ids)
    assert after == records
    assert {record.attempt for record in after} != {1}
    site.check(after)
    assert other.process.poll() is None
    site.nothing_is_left()


def test_flushed_broker_keys_are_put_again(site: Site) -> None:
    """The ledger knows its open jobs; the reconciler gives them their messages back."""
    ids = site.submit(30)
    keys = list(site.server.scan_iter(f"{site.lane.base(LANE)}*"))
    assert keys
    site.server.delete(*keys)
    site.worker()
    site.check(site.wait(ids))
    site.nothing_is_left()


def test_a_job_that_kills_its_worker_three_times_is_a_dead_letter_and_harms_nobody(site: Site) -> None:
    """Its neighbours share the first two crashes; then each of them runs alone, and one of them at a time dies."""
    ids = site.submit(3, params={"sleep_s": 0.2, "steps": 4})
    for _ in range(2):
        assert killed(site.sabotaged("dies while executing")), site.logs()[-3000:]
    assert killed(site.sabotaged("dies while executing"))
    site.worker()
    records = site.wait(ids)
    dead = [record for record in records if record.dead]
    assert len(dead) == 1, [(record.id, record.state, record.suspicions) for record in records]
    assert dead[0].error.kind == "worker_died"
    assert dead[0].suspicions == 3
    rest = [record for record in records if not record.dead]
    assert {record.suspicions for record in rest} == {2}
    assert {record.result.batch_size for record in rest} == {1}
    site.check(rest)
    site.lanes_are_empty()
    kinds = [event.kind for event in site.client.events(dead[0].id, follow=False)]
    assert kinds.count("retrying") == 2
    revive(site, dead[0].id)
    site.nothing_is_left()


def test_an_intake_killed_over_a_message_takes_it_again(site: Site) -> None:
    """kombu gives it back after its visibility timeout; the job is the one that was made of it before."""
    app = make_app(site.settings)
    sent = app.send_task(TASK, kwargs={"model": "noop", "prompt": "p0", "seed": 0})
    assert killed(site.sabotaged("dies after submit", role="chores")), site.logs()[-3000:]
    unacked = f"{site.settings.key_prefix}unacked_index"
    assert site.server.zcard(unacked) == 1
    for tag in site.server.zrange(unacked, 0, -1):
        site.server.zadd(unacked, {tag: 1.0})  # long ago
    site.worker()
    chores = site.sabotaged("nothing", role="chores")
    until(lambda: not site.server.zcard(unacked), 60, "the message's acknowledgement")
    site.check(site.wait([sent.id]))
    chores.terminate()
    assert chores.wait(30) == 0
    app.close()
    site.nothing_is_left()


def revive(site: Site, job_id: str) -> None:
    """By the command line, as an operator would."""
    from click.testing import CliRunner
    from saggar.workers.cli import cli

    options = ["--redis", site.redis.url]
    listed = CliRunner().invoke(cli, ["dead", "list", *options])
    assert job_id in listed.output
    assert "worker_died" in listed.output
    again = CliRunner().invoke(cli, ["dead", "retry", job_id, *options])
    assert again.exit_code == 0, again.output
    (record,) = site.wait([job_id])
    assert record.state == "succeeded"
    assert CliRunner().invoke(cli, ["dead", "list", *options]).stdout == ""
