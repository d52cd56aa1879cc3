"""The ledger under any order of calls: a model that says what must hold, and a machine that tries to break it.

The soak run tries 10,000 sequences (SAGGAR_SOAK_SEQUENCES changes that), the default run a few.
"""

from __future__ import annotations

import os

import fakeredis
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from saggar.jobs import Conflict, JobError, Ledger, NotRetryable
from saggar.jobs.desk import Desk
from saggar.jobs.ledger import NotStarted, Started
from saggar.jobs.record import OPEN, STATES, TERMINAL

from tests.jobs.samples import SETTINGS, event_kinds, lane_messages, make_job, make_result, scan, submit

IDS = st.sampled_from(["a", "b", "c"])
ATTEMPTS = st.integers(0, 4)
WORKERS = st.sampled_from(["w1", "w2"])
ERROR = JobError(kind="permanent", message="no")
LANE = "saggar:gen.saggar--emoji"


class LedgerMachine(RuleBasedStateMachine):
    """The model: for each id its state, attempt, whether it shall stop, how often it ended and was revived; whose
    attempt runs, whether that one executes, and how many died while they did."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = fakeredis.FakeRedis(decode_responses=True)
        self.ledger = Ledger(self.fake, SETTINGS)
        self.state: dict[str, str] = {}
        self.attempt: dict[str, int] = {}
        self.stop: set[str] = set()
        self.tombs: set[str] = set()
        self.ends: dict[str, int] = {}
        self.highest: dict[str, int] = {}
        self.holder: dict[str, str] = {}
        self.executing: set[str] = set()
        self.suspicions: dict[str, int] = {}

    def current(self, job_id: str, attempt: int) -> bool:
        return self.state.get(job_id) == "running" and self.attempt[job_id] == attempt

    def ended(self, job_id: str, state: str) -> None:
        assert self.state.get(job_id) not in TERMINAL, "terminal is final"
        self.state[job_id] = state
        self.ends[job_id] = self.ends.get(job_id, 0) + 1
        self.stop.discard(job_id)

    @rule(job_id=IDS, seed=st.sampled_from([1, 1, 1, 2]))
    def submit(self, job_id: str, seed: int) -> None:
        job = make_job(id=job_id, seed=seed, run="r" if job_id == "a" else None, tags=["t"])
        known = self.ledger.get(job_id)
        if known and known.digest != job.digest():
            with pytest.raises(Conflict):
                submit(self.ledger, job)
            return
        done = submit(self.ledger, job)
        assert done.created == (known is None)
        if known is None:
            self.state[job_id], self.attempt[job_id] = "queued", 0
            if job_id in self.tombs:
                self.tombs.discard(job_id)
                self.ended(job_id, "cancelled")
        assert done.state == self.state[job_id]

    @rule(job_id=IDS, worker=WORKERS, twice=st.booleans(), old_message=st.booleans())
    def start(self, job_id: str, worker: str, twice: bool, old_message: bool) -> None:
        record = self.ledger.get(job_id)
        put = record.put - old_message if record else 1
        token = f"delivery-{self.attempt.get(job_id, 0)}-{len(self.ends)}-{self.ends.get(job_id, 0)}"
        answer = self.ledger.start(job_id, worker, token, put)
        if job_id not in self.state:
            assert answer == NotStarted("unknown")
        elif self.state[job_id] in TERMINAL:
            assert answer == NotStarted("ended", self.state[job_id])  # type: ignore[arg-type]
        elif old_message:
            assert answer == NotStarted("stale")
        else:
            assert isinstance(answer, Started)
            assert answer.stopping == (job_id in self.stop)
            assert answer.attempt == self.attempt[job_id] + 1
            crashed = (
                self.state[job_id] == "running"
                and job_id in self.executing
                and self.holder.get(job_id) != worker
            )
            self.suspicions[job_id] = self.suspicions.get(job_id, 0) + crashed
            assert (answer.crashed, answer.suspicions) == (crashed, self.suspicions[job_id])
            self.holder[job_id] = worker
            self.executing.discard(job_id)
            self.state[job_id], self.attempt[job_id] = "running", answer.attempt
            if twice:
                again = self.ledger.start(job_id, worker, token, put)
                assert isinstance(again, Started)
                assert again.attempt == answer.attempt

    @rule(job_id=IDS, attempt=ATTEMPTS)
    def progress(self, job_id: str, attempt: int) -> None:
        answer = self.ledger.progress(job_id, attempt, 1, 4)
        expected = ("cancel" if job_id in self.stop else "go") if self.current(job_id, attempt) else "fenced"
        assert answer == expected
        if expected != "fenced":
            self.executing.add(job_id)
        assert self.ledger.check([(job_id, attempt)]) == {job_id: expected}

    @rule(job_id=IDS, attempt=ATTEMPTS, twice=st.booleans())
    def commit(self, job_id: str, attempt: int, twice: bool) -> None:
        wins = self.current(job_id, attempt)
        again = self.state.get(job_id) == "succeeded" and self.attempt[job_id] == attempt
        for _ in range(1 + twice):
            assert self.ledger.commit(job_id, attempt, make_result(attempt)).won == (wins or again)
        if wins:
            self.ended(job_id, "succeeded")

    @rule(job_id=IDS, attempt=ATTEMPTS, dead=st.booleans())
    def fail(self, job_id: str, attempt: int, dead: bool) -> None:
        wins = self.current(job_id, attempt)
        answer = self.ledger.fail(job_id, attempt, ERROR, dead=dead)
        assert answer.won == (
            wins or (self.state.get(job_id) == "failed" and self.attempt[job_id] == attempt)
        )
        if wins:
            self.ended(job_id, "failed")

    @rule(job_id=IDS, attempt=ATTEMPTS)
    def stopped(self, job_id: str, attempt: int) -> None:
        wins = self.current(job_id, attempt)
        self.ledger.stopped(job_id, attempt)
        if wins:
            self.ended(job_id, "cancelled")

    @rule(job_id=IDS, attempt=ATTEMPTS, new_message=st.booleans())
    def give_up(self, job_id: str, attempt: int, new_message: bool) -> None:
        """Requeue (drained) or retry (with another message)."""
        mine = self.current(job_id, attempt)
        back = self.state.get(job_id) == "queued" and self.attempt[job_id] == attempt  # said before
        if new_message:
            assert self.ledger.retry(job_id, attempt, ERROR) == (mine or back)
        else:
            assert self.ledger.requeue(job_id, attempt) == (mine or back)
        if mine and job_id in self.stop:
            self.ended(job_id, "cancelled")
        elif mine:
            self.state[job_id] = "queued"

    @rule(job_id=IDS, attempt=ATTEMPTS)
    def disown(self, job_id: str, attempt: int) -> None:
        """The attempt died, its worker lives."""
        assert self.ledger.disown(job_id, attempt) == self.current(job_id, attempt)
        if self.current(job_id, attempt):
            self.holder.pop(job_id, None)

    @rule(job_id=IDS)
    def cancel(self, job_id: str) -> None:
        answer = self.ledger.cancel(job_id)
        state = self.state.get(job_id)
        if state is None:
            assert answer.outcome == "unknown"
            self.tombs.add(job_id)
        elif state in TERMINAL:
            assert (answer.outcome, answer.state) == ("ended", state)
        elif state == "queued":
            assert answer.outcome == "done"
            self.ended(job_id, "cancelled")
        else:
            assert answer.outcome == "requested"
            self.stop.add(job_id)

    @rule(job_id=IDS)
    def revive(self, job_id: str) -> None:
        record = self.ledger.get(job_id)
        if record is None:
            return
        op = Desk.of(SETTINGS).revival(record)
        if self.state[job_id] in ("failed", "cancelled", "expired"):
            assert self.ledger.runner.run(op)
            assert self.ledger.runner.run(op)  # sent twice
            self.state[job_id] = "queued"
            self.suspicions.pop(job_id, None)
        else:
            with pytest.raises(NotRetryable):
                self.ledger.runner.run(op)

    @precondition(lambda self: self.state)
    @rule()
    def lose_all_messages_and_reconcile(self) -> None:
        self.fake.delete(*self.fake.keys(f"{LANE}*") or ["nothing"])
        assert scan(self.ledger).replaced == sum(state in OPEN for state in self.state.values())

    @invariant()
    def the_record_says_what_the_model_says(self) -> None:
        for job_id, state in self.state.items():
            record = self.ledger.get(job_id)
            assert record is not None
            assert record.state == state
            assert record.attempt == self.attempt[job_id]
            assert record.suspicions == self.suspicions.get(job_id, 0)
            assert record.attempt >= self.highest.get(job_id, 0), "attempts only grow"
            self.highest[job_id] = record.attempt
            assert record.cancel_requested == (job_id in self.stop)
            assert (record.result is not None) == (state == "succeeded")
            assert (record.error is not None) == (state == "failed")
            assert (record.times.finished is not None) == record.ended

    @invariant()
    def indexes_are_consistent(self) -> None:
        for state in STATES:
            expected = {job_id for job_id, has in self.state.items() if has == state}
            assert set(self.fake.zrange(f"saggar:state:{state}", 0, -1)) == expected
        assert set(self.fake.zrange("saggar:tag:t", 0, -1)) == set(self.state)
        assert set(self.fake.zrange("saggar:run:r", 0, -1)) == set(self.state) & {"a"}
        for job_id, state in self.state.items():
            for part in ("job", "spec"):
                assert (self.fake.ttl(f"saggar:{part}:{job_id}") == -1) == (state in OPEN)

    @invariant()
    def every_open_job_has_a_message(self) -> None:
        tags = {tag.partition("~")[0] for tag in lane_messages(self.fake)}
        assert {job_id for job_id, state in self.state.items() if state in OPEN} <= tags

    @invariant()
    def one_terminal_event_and_one_celery_result_for_each_end(self) -> None:
        for job_id, state in self.state.items():
            if job_id == "a":
                entries = self.fake.xrange("saggar:events:run:r")
                kinds = [fields["type"] for _, fields in entries]
            else:
                kinds = event_kinds(self.fake, job_id)
            assert sum(kind in TERMINAL for kind in kinds) == self.ends.get(job_id, 0)
            assert bool(self.fake.exists(f"celery-task-meta-{job_id}")) == (state in TERMINAL)

    def teardown(self) -> None:
        self.fake.close()


def run(sequences: int, steps: int) -> None:
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            max_examples=sequences,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=sequences < 1_000,
        ),
    )


def test_any_order_of_calls() -> None:
    run(sequences=500, steps=25)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_any_order_of_calls_at_length() -> None:
    run(sequences=int(os.environ.get("SAGGAR_SOAK_SEQUENCES", "10000")), steps=30)
