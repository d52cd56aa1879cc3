"""Executors: where the ranks run."""

from __future__ import annotations

from saggar.engine.config import EngineConfig
from saggar.engine.executor.base import Executor


def make_executor(config: EngineConfig) -> Executor:
    """The executor that a configuration names."""
    if config.executor == "local":
        from saggar.engine.executor.local import LocalExecutor

        return LocalExecutor(config)
    from saggar.engine.executor.multiproc import MultiprocExecutor

    return MultiprocExecutor(config)
