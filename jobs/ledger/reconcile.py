"""The reconciler: every open job has a message, or gets one.

Ledger and message are written in one script, so a message is missing only after the broker's keys were
flushed or a message became a dead letter. One leader at a time; any process may try. A job that runs while its
message is lost gets one too, and may be computed twice: its worker may be gone, and the ledger cannot know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from saggar.jobs.cards import ModelCard
from saggar.jobs.ledger.message import job_message
from saggar.jobs.ledger.parse import Broken
from saggar.jobs.record import OPEN, JobError
from saggar.jobs.schema import Job

if TYPE_CHECKING:
    from saggar.jobs.ledger.ledger import Ledger
    from saggar.jobs.settings import JobSettings

PAGE = 200  # open jobs looked at by one script: about a millisecond of Redis's time
LEASE_MS = 60_000
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


@dataclass(frozen=True, slots=True)
class Reconciled:
    """How many jobs got their message again, were buried, expired, and were forgotten."""

    replaced: int = 0
    buried: int = 0
    expired: int = 0
    pruned: int = 0


def reconcile(
    ledger: Ledger, settings: JobSettings, card_of: Callable[[str], ModelCard | None]
) -> Reconciled | None:
    """One pass over the open jobs. None: another process is the leader at this moment.

    The pass may be broken off anywhere and made again: a message is put only where there is none.
    """
    client, lock, me = ledger.runner.client, settings.key_prefix + "reconciler", uuid4().hex
    if not client.set(lock, me, nx=True, px=LEASE_MS):
        return None
    try:
        expired = ledger.expire_due()
        replaced, buried = _pass(ledger, card_of, lambda: client.pexpire(lock, LEASE_MS))
        return Reconciled(replaced, buried, expired, ledger.prune())
    finally:
        client.eval(_RELEASE, 1, lock, me)


def _pass(
    ledger: Ledger, card_of: Callable[[str], ModelCard | None], keep_lead: Callable[[], object]
) -> tuple[int, int]:
    replaced = buried = 0
    for state in OPEN:
        cursor: str | None = None
        while True:
            found, cursor = ledger.runner.run(ledger.ops.missing(state, cursor, PAGE))
            for broken in found:
                if broken.what == "lost":
                    replaced += _replace(ledger, broken, card_of)
                else:
                    error = JobError(kind="dead_letter", message="delivered too often without an end")
                    buried += ledger.bury(broken.id, error).won
            keep_lead()
            if cursor is None:
                break
    return replaced, buried


def _replace(ledger: Ledger, broken: Broken, card_of: Callable[[str], ModelCard | None]) -> bool:
    job = Job.model_validate_json(broken.spec)
    message = job_message(job, card_of(job.model), put=broken.put, extras=broken.extras)
    return ledger.runner.run(ledger.ops.replace(job.id, message, broken.put))
