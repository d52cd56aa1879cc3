"""Controlling a run until it stands still: bears a Redis or a store that is away, and a rival that holds the run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import redis
from saggar.jobs.runs import Controller, LeaseLost, Run, RunLedger
from saggar.storage.errors import StorageUnavailable

log = logging.getLogger(__name__)
T = TypeVar("T")
WAIT_S = 0.5
_AWAY = (redis.ConnectionError, redis.TimeoutError, StorageUnavailable)


def stands_still(run: Run) -> bool:
    """Whether nothing more happens by itself: it is over, or paused with nothing in hand."""
    if run.state == "cancelled":
        return run.closed
    if run.state == "done":
        return run.complete
    return run.state == "paused" and run.open == 0


def drive(
    controller: Controller,
    show: Callable[[Run], None] = lambda _: None,
    alive: Callable[[], None] = lambda: None,
    stop: threading.Event | None = None,
) -> Run:
    """Steps until the run stands still, or `stop` is set. While another one holds it, it is only looked at.

    Raises what `alive` raises, UnknownRun, StorageRefused, and errors of Redis other than its being away.
    """
    stop = stop or threading.Event()
    with Heartbeat(Lease(controller.runs, controller.name, controller.token)):
        while True:
            try:
                run = _step(controller, stop)
            except _AWAY as error:
                log.warning("run %s waits: %s", controller.name, error)
                controller.resync()
                stop.wait(WAIT_S)
                alive()
                continue
            show(run)
            if stands_still(run) or stop.is_set():
                return run
            alive()


def _step(controller: Controller, stop: threading.Event) -> Run:
    try:
        return controller.step(WAIT_S)
    except LeaseLost:
        controller.lost()
        stop.wait(WAIT_S)
        return controller.runs.get(controller.name)


@dataclass(frozen=True)
class Lease:
    """A run as the holder of `token` has it."""

    runs: RunLedger
    name: str
    token: str


class Heartbeat:
    """Keeps a lease while its holder is busy with shards or a slow store. It takes none that it has not."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="saggar-run-lease", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the run back, so that another one need not wait."""
        self._over.set()
        self._thread.join()
        try:
            self._lease.runs.release(self._lease.name, self._lease.token)
        except redis.RedisError as error:
            log.warning("the lease of run %s runs out by itself: %s", self._lease.name, error)

    def _beat(self) -> None:
        while not self._over.wait(self._lease.runs.lease_s / 4):
            try:
                self._lease.runs.keep(self._lease.name, self._lease.token)
            except redis.RedisError as error:
                log.warning("the lease of run %s was not renewed: %s", self._lease.name, error)


class Meter:
    """How fast rows come to their ends, since it was first asked: rows a second, and seconds that are left."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before: int | None = None

    def rate(self, run: Run) -> float:
        self._before = run.settled if self._before is None else self._before
        return max(0, run.settled - self._before) / max(time.monotonic() - self._began, 1e-3)
