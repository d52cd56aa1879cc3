"""The ledger: one record for each job, every transition one small Lua script."""

from saggar.jobs.ledger.ledger import Ledger, cancel_channel
from saggar.jobs.ledger.message import PUT_HEADER, TASK, alone_key, is_alone, job_message
from saggar.jobs.ledger.parse import Cancelled, Ending, NotStarted, Orders, Page, Started, Submitted
from saggar.jobs.ledger.reconcile import Reconciled, reconcile

__all__ = [
    "PUT_HEADER",
    "TASK",
    "Cancelled",
    "Ending",
    "Ledger",
    "NotStarted",
    "Orders",
    "Page",
    "Reconciled",
    "Started",
    "Submitted",
    "alone_key",
    "cancel_channel",
    "is_alone",
    "job_message",
    "reconcile",
]
