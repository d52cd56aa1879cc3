"""Between the loop and the ranks: start them, hand them a plan, bring back its report, tell
of their death.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from saggar.engine.worker.plan import Call, Plan, Ready, Reply, Report
from saggar.engine.worker.runner import OnStep


@dataclass(frozen=True)
class Health:
    """`ok` is False once a rank has died; `pids` are the ranks' processes."""

    ok: bool
    pids: tuple[int, ...]
    reason: str = ""


class Executor(Protocol):
    """One group of ranks. `start`, `execute` and `close` are called from one thread at a time, `cancel` from
    any.
    """

    def start(self) -> Ready:
        """Start the ranks and wait until they have loaded and warmed up. Raises what stopped them."""

    def execute(self, plan: Plan, on_step: OnStep) -> Report:
        """Carry out one plan. `on_step` is called between its steps, and with nothing now and then.
        WorkerDied.
        """

    def cancel(self, plan_id: int, request_ids: Iterable[str]) -> None:
        """End these requests of a plan before their next step; nothing happens if the plan is over."""

    def call(self, call: Call) -> list[Reply]:
        """Call a method of every rank's extension, between two plans; a reply a rank. WorkerDied."""

    def health(self) -> Health:
        """Alive or not, without waiting for a forward."""

    def close(self) -> None:
        """End the ranks, at once if they do not end by themselves. Again: nothing happens."""
