"""A worker that harms itself: `python -m tests.chaos.sabotage HOW`, otherwise as saggar.workers.lifecycle.

What production code must bear is done to it from outside, by replacing a method; it knows nothing of this.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any


def dies_after(owner: type, name: str, when: Callable[..., bool] = lambda *_, **__: True) -> None:
    """SIGKILL as soon as the method, called so, has returned something."""
    method = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        answer = method(*args, **kwargs)
        if answer and when(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(owner, name, wrapped)


def dies_after_claim() -> None:
    from saggar.jobs.lanes.lanes import Lanes

    dies_after(Lanes, "take")


def dies_after_start() -> None:
    from saggar.workers.service import Service

    dies_after(Service, "start_all")


def dies_while_executing() -> None:
    """Once the ledger has heard that the engine began."""
    from saggar.workers.attempts import Attempts

    tell = Attempts._tell

    def told(self: Attempts, news: list[Any], now: float) -> None:
        tell(self, news, now)
        if any(attempt.phase == "executing" for attempt in news):
            os.kill(os.getpid(), signal.SIGKILL)

    Attempts._tell = told  # type: ignore[method-assign]


def dies_after_put() -> None:
    from saggar.storage.s3 import S3Storage

    dies_after(S3Storage, "put", lambda _, key, *__: "/a1/" in key)


def dies_after_manifest() -> None:
    from saggar.workers.publish import Publisher

    dies_after(Publisher, "commit")


def dies_after_commit() -> None:
    from saggar.jobs.ledger import Ledger

    dies_after(Ledger, "commit")


def dies_amid_a_group(publish: str, count: int) -> None:
    """When `count` objects of a group have their names, which are not flushed yet."""
    from saggar.storage import local

    give = getattr(local, publish)
    given: list[object] = []

    def wrapped(*args: Any) -> None:
        give(*args)
        given.append(args)
        if len(given) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(local, publish, wrapped)


def dies_after_group(step: str) -> None:
    from saggar.storage.local import LocalStorage

    dies_after(LocalStorage, step)


def dies_after_records() -> None:
    """Those of a group, in one round trip."""
    from saggar.jobs.ledger.ledger import Runner

    def commits(_: Runner, ops: Any) -> bool:
        return any(op.script == "finish" for op in ops)

    dies_after(Runner, "run_many", commits)


def dies_after_submit() -> None:
    from saggar.jobs.ledger import Ledger

    dies_after(Ledger, "submit")


def without_heartbeat() -> None:
    """Cut off from the lanes after its first claim: it can neither keep that one nor make another."""
    from saggar.jobs.lanes.lanes import Lanes

    take = Lanes.take
    claims: list[object] = []

    def once(self: Lanes, *args: Any, **kwargs: Any) -> Any:
        claim = None if claims else take(self, *args, **kwargs)
        claims.extend([claim] if claim else [])
        return claim

    Lanes.beat = lambda self: None  # type: ignore[method-assign]
    Lanes.take = once  # type: ignore[method-assign]


def sends_everything_twice() -> None:
    """As redis-py does when it did not see the reply to a command."""
    import redis

    execute = redis.Redis.execute_command

    def twice(self: redis.Redis, *args: Any, **options: Any) -> Any:
        if args[0] in ("EVALSHA", "EVAL"):
            execute(self, *args, **options)
        return execute(self, *args, **options)

    redis.Redis.execute_command = twice  # type: ignore[method-assign]
    pipeline = redis.client.Pipeline.execute

    def pipe_twice(self: redis.client.Pipeline, raise_on_error: bool = True) -> Any:
        stack = list(self.command_stack)
        pipeline(self, raise_on_error)
        self.command_stack = stack
        return pipeline(self, raise_on_error)

    redis.client.Pipeline.execute = pipe_twice  # type: ignore[method-assign]


def shift_clock(seconds: float) -> None:
    """The machine's clock is wrong: what Python calls the time of day."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)
    assert datetime.now(UTC) is not None


HOW: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "dies after claim": dies_after_claim,
    "dies after start": dies_after_start,
    "dies while executing": dies_while_executing,
    "dies after put": dies_after_put,
    "dies after manifest": dies_after_manifest,
    "dies after commit": dies_after_commit,
    "dies amid objects": lambda: dies_amid_a_group("_replace", 5),
    "dies after objects": lambda: dies_after_group("put_group"),
    "dies amid manifests": lambda: dies_amid_a_group("_link", 3),
    "dies after manifests": lambda: dies_after_group("put_group_if_absent"),
    "dies after records": dies_after_records,
    "dies after submit": dies_after_submit,
    "without heartbeat": without_heartbeat,
    "sends everything twice": sends_everything_twice,
    "clock a minute fast": lambda: shift_clock(60),
    "clock a minute slow": lambda: shift_clock(-60),
}


if __name__ == "__main__":
    HOW[sys.argv[1]]()
    from saggar.workers.lifecycle import main

    sys.exit(main())
