"""The Celery tasks: thin skins over the service, in Celery's own words for what became of a message."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import redis
from celery.exceptions import Ignore, Reject
from saggar.jobs.errors import InvalidJob, JobFailed
from saggar.jobs.lanes import Lanes
from saggar.jobs.lanes.message import KEY_HEADER
from saggar.jobs.ledger import PUT_HEADER, TASK, Ledger
from saggar.workers.appetite import EngineAppetite
from saggar.workers.service import Dropped, GivenBack, Service

if TYPE_CHECKING:
    from celery import Celery, Task

log = logging.getLogger(__name__)


def register_generate(app: Celery, service: Service, appetite: EngineAppetite, lanes: Lanes) -> None:
    """The task of a model's worker: message J is job J.

    Its return value is the job's result as JSON values, which `AsyncResult.get` gives to whoever asks and Celery passes
    on to links and chords.
    """

    # typing=False: the next link of a chain is sent from here with a job's fields, which the intake's task takes.
    @app.task(  # type: ignore[untyped-decorator]
        name=TASK, bind=True, acks_late=True, throws=(JobFailed,), typing=False, resultrepr_maxsize=48
    )
    def generate(task: Task, job_id: str) -> dict[str, object]:
        tag = task.request.properties["delivery_tag"]
        reservation = appetite.take(tag)
        try:
            if not lanes.started(tag):
                raise Ignore(f"{job_id} was given back before it started")
            put, key = (getattr(task.request, name, None) for name in (PUT_HEADER, KEY_HEADER))
            return service.run(job_id, tag, put or 1, key, reservation).model_dump(
                mode="json", exclude_none=True
            )
        except Dropped as dropped:
            raise Ignore(str(dropped)) from dropped
        except GivenBack as back:
            raise Reject(str(back), requeue=True) from back
        except (Ignore, JobFailed):
            raise
        except Exception as error:  # nothing could be said of the job: it must come again, and not for ever
            log.exception("%s: neither done nor failed", job_id)
            raise Reject(str(error), requeue=True) from error
        finally:
            if reservation is not None:
                reservation.release()


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
