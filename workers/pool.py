"""Celery's pool of threads, for tasks that begin in the line: a job's task gets a thread once it needs one.

Celery is told that a task has begun when its job is taken up, and of the time since then when it ends.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from celery.concurrency.base import apply_target
from celery.concurrency.thread import TaskPool
from celery.exceptions import Reject
from saggar.jobs.lanes.message import KEY_HEADER
from saggar.jobs.ledger import PUT_HEADER, TASK
from saggar.workers.line import Line, Work

TRACE_LOGGER = "celery.app.trace"
_BEGAN: ContextVar[float | None] = ContextVar("saggar_began", default=None)
Traced = tuple[int, object, float]
"""What Celery's tracer gives back: whether it failed, what it returned or raised, how long it took."""


def pool_on(line: Line) -> type[TaskPool]:
    """The pool's class, for Celery's `pool`."""

    class LinePool(TaskPool):  # type: ignore[misc]
        """Other tasks than ours run as in any pool of threads."""

        def on_apply(
            self,
            target: Callable[..., Traced],
            args: tuple[Any, ...],
            kwargs: Mapping[str, object] | None = None,
            callback: Callable[[Traced], object] | None = None,
            accept_callback: Callable[[int, float], object] | None = None,
            **options: object,
        ) -> object:
            if args[0] != TASK or callback is None:
                return super().on_apply(target, args, kwargs, callback, accept_callback, **options)
            began = time.monotonic()
            delivery = line.delivery(*_message(args))
            if accept_callback is not None:
                accept_callback(os.getpid(), began)

            def told(traced: Traced) -> None:
                failed, outcome, _ = traced
                callback((failed, outcome, time.monotonic() - began))

            def here() -> None:
                before = _BEGAN.set(began)
                try:
                    apply_target(target, args, kwargs, told)
                finally:
                    _BEGAN.reset(before)
                    line.left(delivery.token)

            line.take(Work(delivery, here, lambda: self.executor.submit(here)))
            return None

        def on_start(self) -> None:
            logging.getLogger(TRACE_LOGGER).addFilter(as_it_was)

        def on_stop(self) -> None:
            logging.getLogger(TRACE_LOGGER).removeFilter(as_it_was)
            line.close()
            super().on_stop()

    return LinePool


def as_it_was(record: logging.LogRecord) -> bool:
    """Corrects what Celery's tracer logs of a task: the time, which is that of its last step; and a message that goes
    back is no error with a traceback, or each ordinary stop would look like a crash."""
    if record.exc_info and isinstance(record.exc_info[1], Reject):
        record.exc_info = None
    began = _BEGAN.get()
    if began is not None and isinstance(record.args, dict) and "runtime" in record.args:
        record.args["runtime"] = time.monotonic() - began
    return True


def _message(args: tuple[Any, ...]) -> tuple[str, str, int, str | None]:
    """The job's id, the delivery's tag, the message's number and batch key, of what Celery gives its tracer."""
    request: Mapping[str, Any] = args[2]
    return (
        args[1],
        request["properties"]["delivery_tag"],
        request.get(PUT_HEADER) or 1,
        request.get(KEY_HEADER),
    )
