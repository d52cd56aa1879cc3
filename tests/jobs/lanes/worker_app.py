"""A Celery application on lanes, as small as can be, for workers that tests start and kill."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from celery import Celery, signals
from celery.exceptions import Ignore
from saggar.jobs.lanes import LateAppetite, PrefetchAppetite, broker_url, lane_name, lanes_of, register

LANE = lane_name("m")
URL = os.environ["TEST_REDIS_URL"]
FOLDER = Path(os.environ.get("TEST_FOLDER", "."))

register()
appetite = LateAppetite()
app = Celery("lanes", broker=broker_url(URL), backend=URL)
app.conf.update(
    broker_transport_options={
        "appetite": appetite,
        "global_keyprefix": "p:",
        "lane_heartbeat_s": 0.3,
        "socket_timeout": 2,
        "socket_connect_timeout": 2,
    },
    broker_connection_retry_on_startup=True,
    task_acks_late=True,
    task_default_queue="chores",
    task_routes={"run": {"queue": LANE}, "flaky": {"queue": LANE}},
    task_track_started=False,
    worker_prefetch_multiplier=1,
    worker_enable_prefetch_count_reduction=False,
)
lanes = lanes_of(app)


@app.task(name="run", bind=True)
def run(self, name: str) -> str:
    """Notes its run; gives up when it does not hold its message any more."""
    if not lanes.started(self.request.properties["delivery_tag"]):
        raise Ignore
    with (FOLDER / "runs").open("a") as runs:  # in a file: also when Redis is down
        runs.write(f"{name}\n")
    if (FOLDER / "seconds").exists():
        time.sleep(float((FOLDER / "seconds").read_text()))  # the job's work
    return name


@app.task(name="flaky", bind=True, max_retries=3)
def flaky(self, name: str) -> int:
    if self.request.retries < 2:
        raise self.retry(countdown=0.1)
    return self.request.retries


@app.task(name="join")
def join(*parts: object) -> str:
    return "+".join(str(part) for part in parts)


@app.task(name="gather")
def gather(parts: list[str]) -> str:
    return "+".join(sorted(parts))


@signals.worker_ready.connect
def ready(**_: object) -> None:
    appetite.fill(PrefetchAppetite())  # as if the engine came last
    lanes.wake()
    app.backend.client.rpush("ready", os.getpid())


@signals.worker_shutting_down.connect
def stopping(**_: object) -> None:
    # In another thread: a signal handler may have interrupted whoever holds the lock.
    threading.Thread(target=lanes.give_back).start()
