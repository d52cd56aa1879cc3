"""The model in the engine's own process and thread: for tests, notebooks and families without torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from saggar.engine.config import EngineConfig
from saggar.engine.executor.base import Health
from saggar.engine.worker.loader import load
from saggar.engine.worker.plan import Call, Plan, Ready, Reply, Report
from saggar.engine.worker.runner import OnStep, Runner
from saggar.engine.worker.team import Team


class LocalExecutor:
    """See executor.base.Executor. `execute` blocks its caller during a forward."""

    def __init__(self, config: EngineConfig, replica: int = 0) -> None:
        self._config = config
        self._team = Team(0, slot=replica)
        self._runner: Runner | None = None
        self._cancelled: set[tuple[int, str]] = set()

    def start(self, idle: Callable[[], None] = lambda: None) -> Ready:
        """Load in this process; `idle` is never called."""
        self._runner, ready = load(self._config, self._team)
        return ready

    def execute(self, plan: Plan, on_step: OnStep) -> Report:
        """Carry out one plan here and now."""
        assert self._runner is not None, "start first"
        report = self._runner.execute(plan, lambda failed: self._cancels_of(plan), on_step)
        self._cancelled.clear()
        return report

    def cancel(self, plan_id: int, request_ids: Iterable[str]) -> None:
        """Remembered until the plan asks."""
        self._cancelled.update((plan_id, request_id) for request_id in request_ids)

    def call(self, call: Call, idle: Callable[[], None] = lambda: None) -> list[Reply]:
        """Call it here."""
        assert self._runner is not None, "start first"
        return [self._runner.call(call)]

    def health(self) -> Health:
        """As alive as this process."""
        return Health(True, (os.getpid(),))

    def abort(self) -> None:
        """Let go of the weights."""
        self._runner = None

    def close(self) -> None:
        """Let go of the weights."""
        self._runner = None

    def _cancels_of(self, plan: Plan) -> set[str]:
        return {request_id for plan_id, request_id in list(self._cancelled) if plan_id == plan.id}
