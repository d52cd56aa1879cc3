"""Executors: where the ranks run."""

from __future__ import annotations

from saggar.engine.config import EngineConfig
from saggar.engine.executor.base import Executor


def make_executor(config: EngineConfig, replica: int = 0) -> Executor:
    """The executor that a configuration names, for one replica."""
    if config.executor == "local":
        from saggar.engine.executor.local import LocalExecutor

        return LocalExecutor(config, replica)
    from saggar.engine.executor.multiproc import MultiprocExecutor

    return MultiprocExecutor(config, replica)
