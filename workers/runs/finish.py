"""Which finisher a run needs."""

from __future__ import annotations

from saggar.jobs.client import JobClient
from saggar.jobs.runs import Controller, RunSpec
from saggar.storage.base import Storage
from saggar.workers.runs.deliver import Delivery
from saggar.workers.runs.folder import RunFolder


def finisher_of(
    spec: RunSpec, client: JobClient, controller: Controller, target: Storage, folder: RunFolder
) -> Delivery:
    """Close what it returns."""
    return Delivery(client, target, folder)
