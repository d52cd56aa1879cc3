"""The Celery application: one configuration for workers and for whoever sends tasks by Celery's own means.

`celery -A saggar.workers.app ...` (flower, inspect, control) uses the environment's settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from saggar.jobs.lanes.broker import backend_url, backend_use_ssl, broker_url, broker_use_ssl, register
from saggar.jobs.ledger import TASK
from saggar.jobs.settings import JobSettings

if TYPE_CHECKING:
    from celery import Celery
    from saggar.jobs.lanes import Appetite

CHORES_QUEUE = "saggar.chores"
INTAKE_QUEUE = "saggar.intake"
INTAKE_VISIBILITY_S = 300


def make_app(settings: JobSettings, appetite: Appetite | None = None) -> Celery:
    """An application for this Redis. `appetite` is a model worker's; without one, lanes are only written to."""
    from celery import Celery

    register()
    app = Celery("saggar", set_as_current=False)
    options: dict[str, object] = {
        "global_keyprefix": settings.key_prefix,
        # Of the intake, whose work takes milliseconds and may be done twice. Lanes have leases.
        "visibility_timeout": INTAKE_VISIBILITY_S,
    }
    if appetite is not None:
        options["appetite"] = appetite
    app.conf.update(
        broker_url=broker_url(settings.redis_url),
        broker_use_ssl=broker_use_ssl(settings.redis_url),
        broker_transport_options=options,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        result_backend=backend_url(settings.redis_url),
        redis_backend_use_ssl=backend_use_ssl(settings.redis_url),
        result_expires=settings.result_ttl_s,
        task_default_queue=CHORES_QUEUE,
        # A job sent as keywords, by send_task or as the next link of a chain, is checked before it gets to a lane.
        task_routes={TASK: {"queue": INTAKE_QUEUE}},
        task_serializer="json",
        result_serializer="json",
        accept_content=["json"],
        task_acks_late=True,
        worker_consumer="saggar.workers.consumer:Consumer",
        worker_prefetch_multiplier=1,
        worker_enable_prefetch_count_reduction=False,  # else a reconnection lowers the prefetch twice
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_hijack_root_logger=False,
        worker_send_task_events=False,  # Flower turns them on; without a listener they cost a quarter of the event loop
        enable_utc=True,
    )
    return app


def __getattr__(name: str) -> Celery:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return make_app(JobSettings.from_env())
