"""The Celery tasks: thin skins over the service, in Celery's own words for what became of a message."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import redis
from celery.exceptions import Ignore, Reject
from saggar.jobs.errors import InvalidJob, JobFailed
from saggar.jobs.ledger import TASK, Ledger
from saggar.workers.service import Dropped, GivenBack

if TYPE_CHECKING:
    from celery import Celery, Task
    from saggar.workers.line import Line

log = logging.getLogger(__name__)


def register_generate(app: Celery, line: Line) -> None:
    """The task of a model's worker: message J is job J. It runs at the job's end, when the line (line.py) says so.

    Its return value is the job's result as JSON values, which `AsyncResult.get` gives to whoever asks and Celery passes
    on to links and chords.
    """

    # typing=False: the next link of a chain is sent from here with a job's fields, which the intake's task takes.
    @app.task(  # type: ignore[untyped-decorator]
        name=TASK, bind=True, acks_late=True, throws=(JobFailed,), typing=False, resultrepr_maxsize=48
    )
    def generate(task: Task, job_id: str) -> dict[str, object]:
        try:
            result = line.finish(task.request.properties["delivery_tag"])
            return result.model_dump(mode="json", exclude_none=True)
        except Dropped as dropped:
            raise Ignore(str(dropped)) from dropped
        except GivenBack as back:
            raise Reject(str(back), requeue=True) from back
        except (Ignore, JobFailed):
            raise
        except Exception as error:  # nothing could be said of the job: it must come again, and not for ever
            log.exception("%s: neither done nor failed", job_id)
            raise Reject(str(error), requeue=True) from error


def register_revoke(ledger: Ledger) -> None:
    """Celery's `revoke` also cancels the job of that id, waiting or running. Once a process: the panel is Celery's own.

    Every worker hears it; cancelling twice is cancelling once.
    """
    from celery.worker import control

    revoke = control.Panel.data["revoke"]

    def revoke_and_cancel(state: object, task_id: str | list[str], **options: object) -> Mapping[str, object]:
        for job_id in [task_id] if isinstance(task_id, str) else task_id:
            try:
                ledger.cancel(job_id)
            except InvalidJob:
                log.debug("a revoked task has an id that no job can have")
            except redis.RedisError as error:
                log.error("revoke of %s could not cancel its job: %s", job_id, error)
        answer: Mapping[str, object] = revoke(state, task_id, **options)
        return answer

    control.Panel.data["revoke"] = revoke_and_cancel
