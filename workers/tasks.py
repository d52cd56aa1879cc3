"""The Celery tasks: thin skins over the service, in Celery's own words for what became of a message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery.exceptions import Ignore, Reject
from saggar.jobs.errors import JobFailed
from saggar.jobs.lanes import Lanes
from saggar.jobs.ledger import PUT_HEADER, TASK
from saggar.workers.appetite import EngineAppetite
from saggar.workers.service import Dropped, GivenBack, Service

if TYPE_CHECKING:
    from celery import Celery, Task


def register_generate(app: Celery, service: Service, appetite: EngineAppetite, lanes: Lanes) -> None:
    """The task of a model's worker: message J is job J.

    Its return value is the job's result as JSON values, which `AsyncResult.get` gives to whoever asks and Celery passes
    on to links and chords.
    """

    @app.task(name=TASK, bind=True, acks_late=True, throws=(JobFailed,))  # type: ignore[untyped-decorator]
    def generate(task: Task, job_id: str) -> dict[str, object]:
        tag = task.request.properties["delivery_tag"]
        reservation = appetite.take(tag)
        try:
            if not lanes.started(tag):
                raise Ignore(f"{job_id} was given back before it started")
            put = getattr(task.request, PUT_HEADER, None)
            return service.run(job_id, tag, put, reservation).model_dump(mode="json", exclude_none=True)
        except Dropped as dropped:
            raise Ignore(str(dropped)) from dropped
        except GivenBack as back:
            raise Reject(str(back), requeue=True) from back
        finally:
            if reservation is not None:
                reservation.release()
