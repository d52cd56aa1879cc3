"""The reconciler: every open job has a message, or gets one.

Ledger and message are written in one script, so a message is missing only after the broker's keys were
flushed or a message became a dead letter. One process at a time; any may try. A job that runs while its
message is lost gets one too, and may be computed twice: its worker may be gone, and the ledger cannot know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from saggar.jobs.cards import ModelCard
from saggar.jobs.errors import InvalidCard, InvalidJob
from saggar.jobs.ledger.message import job_message
from saggar.jobs.ledger.parse import Broken
from saggar.jobs.record import OPEN, JobError
from saggar.jobs.schema import read_job

if TYPE_CHECKING:
    from saggar.jobs.ledger.ledger import Ledger
    from saggar.jobs.settings import JobSettings

log = logging.getLogger(__name__)

PAGE = 200  # open jobs looked at by one script: about a millisecond of Redis's time
ROUND_MS = 4_500  # a turn: a little less than the five seconds after which workers try again
SCAN_MS = 60_000  # between two looks at all open jobs


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
    """One turn: deadlines and old records; once a minute also a pass over all open jobs, for lost messages.

    However many processes try, one has the turn: None for the others. Nobody gives it back, it runs out. A pass may be
    broken off anywhere and made again: a message is put only where there is none.
    """
    client, lock = ledger.runner.client, settings.key_prefix + "reconciler"
    if not client.set(lock, "1", nx=True, px=ROUND_MS):
        return None
    done = Reconciled(expired=ledger.expire_due(), pruned=ledger.prune())
    scan = lock + ":scan"
    if not client.set(scan, "1", nx=True, px=SCAN_MS):
        return done
    replaced, buried = _pass(ledger, card_of, lambda: client.pexpire(scan, SCAN_MS))
    return replace(done, replaced=replaced, buried=buried)


def _pass(
    ledger: Ledger, card_of: Callable[[str], ModelCard | None], keep_turn: Callable[[], object]
) -> tuple[int, int]:
    replaced = buried = 0
    for state in OPEN:
        cursor: str | None = None
        while True:
            found, cursor = ledger.runner.run(ledger.ops.missing(state, cursor, PAGE))
            for broken in found:
                if broken.what == "lost":
                    replaced += _put_again(ledger, broken, card_of)
                else:
                    error = JobError(kind="dead_letter", message="delivered too often without an end")
                    buried += ledger.bury(broken.id, error).won
            keep_turn()
            if cursor is None:
                break
    return replaced, buried


def _put_again(ledger: Ledger, broken: Broken, card_of: Callable[[str], ModelCard | None]) -> bool:
    try:
        job = read_job(broken.spec)
        card = card_of(job.model)
    except InvalidJob as error:  # nobody could do it
        ledger.give_up(broken.id, JobError(kind="unreadable", message=str(error)))
        return False
    except InvalidCard as error:
        log.warning("job %s waits for a card that can be read: %s", broken.id, error)
        card = None
    message = job_message(job, card, put=broken.put, extras=broken.extras)
    return ledger.runner.run(ledger.ops.replace(job.id, message, broken.put))
