"""Between the loop and the ranks: start them, hand them a plan, bring back its report, tell
of their death.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from saggar.engine.worker.plan import Call, Plan, Ready, Reply, Report
from saggar.engine.worker.runner import OnStep


@dataclass(frozen=True)
class Health:
    """`ok`: it serves. `reason` says what is wrong; `over`: it will not come back by itself. `pids` are the ranks'
    processes.
    """

    ok: bool
    pids: tuple[int, ...]
    reason: str = ""
    over: bool = False


class Executor(Protocol):
    """One group of ranks. `start`, `execute`, `abort` and `close` are called from one thread at a time, `cancel`
    and `health` from any.
    """

    def start(self, idle: Callable[[], None] = lambda: None) -> Ready:
        """Start the ranks and wait until they have loaded and warmed up. Raises what stopped them.

        `idle` is called now and then; what it raises ends the start.
        """

    def execute(self, plan: Plan, on_step: OnStep) -> Report:
        """Carry out one plan. `on_step` is called between its steps, and with nothing now and then.
        WorkerDied.
        """

    def cancel(self, plan_id: int, request_ids: Iterable[str]) -> None:
        """End these requests of a plan before their next step; nothing happens if the plan is over."""

    def call(self, call: Call, idle: Callable[[], None] = lambda: None) -> list[Reply]:
        """Call a method of the ranks' extension, between two plans; a reply a rank. WorkerDied.

        `idle` is called now and then.
        """

    def health(self) -> Health:
        """Alive or not, without waiting for a forward."""

    def abort(self) -> None:
        """Kill what is left of the ranks; `start` may follow."""

    def close(self) -> None:
        """End the ranks, at once if they do not end by themselves. Again: nothing happens."""
