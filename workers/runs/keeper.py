"""Detached runs: any worker of a cluster may be the one that controls them, under the run's lease."""

from __future__ import annotations

import logging
import threading
import uuid
from contextlib import ExitStack

import redis
from saggar.jobs.client import JobClient
from saggar.jobs.errors import SaggarError, UnknownRun
from saggar.jobs.runs import Controller, LeaseLost, Run, RunLedger
from saggar.jobs.settings import JobSettings, connect
from saggar.storage.base import open_storage
from saggar.storage.errors import StorageError
from saggar.workers.runs.drive import drive, stands_still
from saggar.workers.runs.folder import RunFolder

log = logging.getLogger(__name__)
CHORES_EVERY_S = 2.0
MODEL_EVERY_S = 20.0
"""A worker with an engine looks more rarely: where there are workers for chores, they come first."""
MOST = 16
"""Runs that one process controls at a time."""


class RunKeeper:
    """A thread that looks for detached runs without a controller, and a thread for each that it controls."""

    def __init__(self, settings: JobSettings, every_s: float) -> None:
        self._settings = settings
        self._every_s = every_s
        self._closed = threading.Event()
        self._runs: dict[str, threading.Thread] = {}
        self._thread = threading.Thread(target=self._live, name="saggar-runs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Gives its runs back and waits for that."""
        self._closed.set()
        self._thread.join()
        for thread in self._runs.values():
            thread.join()

    def _live(self) -> None:
        client = connect(self._settings)
        try:
            while not self._closed.wait(self._every_s):
                try:
                    self._look(RunLedger(client, self._settings))
                except redis.RedisError as error:
                    log.warning("detached runs wait for the next look: %s", error)
        finally:
            client.close()

    def _look(self, runs: RunLedger) -> None:
        self._runs = {name: thread for name, thread in self._runs.items() if thread.is_alive()}
        for run in runs.list():
            free = run.spec.detached and not run.held and not stands_still(run)
            if free and run.name not in self._runs and len(self._runs) < MOST:
                self._runs[run.name] = threading.Thread(
                    target=self._control, args=(run,), name=f"saggar-run-{run.name}", daemon=True
                )
                self._runs[run.name].start()

    def _control(self, run: Run) -> None:
        token = uuid.uuid4().hex
        try:
            control(run, self._settings, self._closed, token)
        except (SaggarError, StorageError, redis.RedisError) as error:
            self._pause(run, str(error), token)
        except Exception as error:
            log.exception("run %s cannot be controlled", run.name)
            self._pause(run, type(error).__name__, token)

    def _pause(self, run: Run, why: str, token: str) -> None:
        """Somebody must look: another try would end the same way. Not of a run that another one has by now. What was
        cancelled stays so, and nobody tries to write its end again."""
        client = connect(self._settings)
        try:
            runs = RunLedger(client, self._settings)
            state = runs.change(run.name, "paused", why[:500], token=token)
            if state == "cancelled":
                self._give_up(runs, run.name, token)
                log.error("run %s is cancelled, and its report could not be written: %s", run.name, why)
            else:
                log.error("run %s is %s: %s", run.name, state, why)
        except (LeaseLost, UnknownRun) as error:
            log.warning("run %s is somebody else's, or forgotten: %s", run.name, error)
        except redis.RedisError as error:
            log.error("run %s could not be paused: %s", run.name, error)
        finally:
            client.close()

    def _give_up(self, runs: RunLedger, name: str, token: str) -> None:
        """Raises LeaseLost: another one has it, and tries."""
        if not runs.claim(name, token):  # it was given back
            raise LeaseLost(name)
        runs.close(name, token)
        runs.release(name, token)


def control(run: Run, settings: JobSettings, stop: threading.Event, token: str | None = None) -> Run:
    """Controls a run from here until it stands still or `stop` is set.

    Raises StorageError, SaggarError and errors of Redis that do not pass.
    """
    from saggar.workers.runs.finish import RunFinisher  # what it imports, an idle worker does not need

    with ExitStack() as stack:
        client = connect(settings)
        stack.callback(client.close)
        jobs = stack.enter_context(JobClient(settings))
        target = open_storage(run.spec.target)
        stack.callback(target.close)
        folder = RunFolder(target, run.name)
        controller = Controller(run.name, jobs, client, folder, token=token)
        finisher = RunFinisher(run.spec, jobs, controller, target, folder)
        stack.callback(finisher.close)
        controller.finisher = finisher
        return drive(controller, stop=stop)
