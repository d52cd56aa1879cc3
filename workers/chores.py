"""The worker for chores: jobs sent by Celery's own means come in here, are checked, and go to their lane.

`app.send_task("saggar.generate", kwargs=job, queue="saggar.intake")` makes job J of message J; links, chords and groups
travel along into the lane's message. Lanes and chores never share a worker.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING

from celery.exceptions import Ignore
from saggar.jobs.cards import Cards, completed, unknown_model
from saggar.jobs.errors import Conflict, QueueFull, SaggarError
from saggar.jobs.ledger import TASK, Ledger, job_message
from saggar.jobs.schema import Job, parse_job
from saggar.jobs.settings import connect
from saggar.storage.base import open_storage
from saggar.workers.app import CHORES_QUEUE, INTAKE_QUEUE, make_app
from saggar.workers.housekeeping import Housekeeper
from saggar.workers.runs.keeper import CHORES_EVERY_S, RunKeeper
from saggar.workers.settings import WorkerSettings
from saggar.workers.tasks import register_revoke

if TYPE_CHECKING:
    from celery import Celery, Task
    from celery.app.task import Context

# What Celery needs to go on after the job's end, wherever its message was sent from.
_HEADERS = (
    "root_id",
    "parent_id",
    "group",
    "group_index",
    "replaced_task_nesting",
    "stamped_headers",
    "stamps",
)
_THREADS = 4


def register_intake(app: Celery, ledger: Ledger, cards: Cards) -> None:
    """The task of the intake queue. Its failure is the refusal, in one line."""

    @app.task(  # type: ignore[untyped-decorator]
        name=TASK, bind=True, acks_late=True, max_retries=None, throws=(SaggarError,)
    )
    def intake(task: Task, **fields: object) -> None:
        job = parse_job({**fields, "id": task.request.id})
        try:
            submit_sent(ledger, cards, job, extras_of(task.request))
        except QueueFull as full:
            raise task.retry(countdown=full.retry_after_s, exc=full) from full
        raise Ignore(f"{job.id} is in its lane")


def submit_sent(ledger: Ledger, cards: Cards, job: Job, extras: str) -> None:
    """Checks and queues a job whose message came by Celery. Raises InvalidJob, UnknownModel, Conflict, QueueFull."""
    card = cards.get(job.model)
    if card is None and not job.allow_unserved:
        raise unknown_model(job.model, [known.model for known in cards.list()])
    checked = completed(job, card)
    submitted = ledger.submit(checked, job_message(checked, card, extras=extras), job.digest(), extras)
    if submitted.id != job.id:  # message J must be job J, or nobody would ever answer for it
        raise Conflict("idempotency_key", submitted.id, "id")


def extras_of(request: Context) -> str:
    """The links, group and chord of a message, as the ledger keeps them: JSON, "" when there are none."""
    headers = {
        name: value for name in _HEADERS if (value := getattr(request, name, None)) not in (None, 0, [], {})
    }
    embed = {
        "callbacks": request.callbacks,
        "errbacks": request.errbacks,
        "chain": request.chain,
        "chord": request.chord,
    }
    embed = {name: value for name, value in embed.items() if value}
    return json.dumps({"headers": headers, "embed": embed}) if headers or embed else ""


class ChoresWorker:
    """`run` blocks until the worker has ended; its exit status."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings

    def run(self) -> int:
        """Raises ConfigError, StorageConfigError."""
        with ExitStack() as stack:
            client = connect(self._settings.jobs)
            stack.callback(client.close)
            storage = open_storage(self._settings.store)
            stack.callback(storage.close)
            stack.callback(Housekeeper(client, self._settings.jobs, storage).close)
            stack.callback(RunKeeper(self._settings.jobs, CHORES_EVERY_S).close)
            app = make_app(self._settings.jobs)
            ledger = Ledger(client, self._settings.jobs)
            register_intake(app, ledger, Cards(client, self._settings.jobs))
            register_revoke(ledger)
            worker = app.Worker(
                pool="threads",
                concurrency=_THREADS,
                queues=[CHORES_QUEUE, INTAKE_QUEUE],
                hostname=f"chores@{self._settings.owner.replace(':', '-')}",
                without_gossip=True,
                without_mingle=True,
                loglevel=self._settings.log_level.upper(),
                redirect_stdouts=False,
            )
            worker.start()
        return worker.exitcode or 0
