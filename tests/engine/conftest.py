"""Models for the engine's tests, built once a session, and engines that are closed for sure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from saggar.engine import Engine, EngineConfig
from saggar.engine.models.tiny import make_tiny

# Before torch is loaded: see the multiproc executor.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

MakeEngine = Callable[..., Engine]
IN_RANKS = {"flux", "sdxl"}
"""The families that CI also runs in rank processes: what carries a plan there knows none of them. All run in soak."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = (
            item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        )
        if (
            "case" in params
            and params.get("way", ("",))[0] == "multiproc"
            and params["case"].name not in IN_RANKS
        ):
            item.add_marker(pytest.mark.soak)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model's folder by family name, each built once."""
    folder = tmp_path_factory.mktemp("models")

    def model(family: str) -> Path:
        path = folder / family
        return path if path.exists() else make_tiny(family, path)

    return model


@pytest.fixture
def make_engine(models: Callable[[str], Path]) -> Iterator[MakeEngine]:
    """Engines of tiny models in this process; keywords go to EngineConfig."""
    engines: list[Engine] = []

    def make(family: str = "noop", scheduler: Any = None, **settings: Any) -> Engine:
        folder = settings.pop("model", None) or str(models(family))
        config = EngineConfig(model=folder, **{"executor": "local", "threads": 1, **settings})
        engines.append(Engine.make(config, scheduler=scheduler))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(params=["local", pytest.param("multiproc", marks=pytest.mark.procs)])
def executor(request: pytest.FixtureRequest) -> str:
    """Both executors."""
    return str(request.param)


@pytest.fixture(params=["request_batch", "step_batch"])
def mode(request: pytest.FixtureRequest) -> str:
    """Both modes of the loop."""
    return str(request.param)
