"""Models for the engine's tests, built once a session, and engines that are closed for sure."""

from __future__ import annotations

import os
import shutil
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
MAIN = {
    "test_in_a_batch_of_three_unlike_rows",
    "test_joined_midway_and_left_early",
    "test_preempted_and_resumed",
    "test_zero_and_empty_are_values",
    "test_each_size_has_the_right_picture_and_its_own_key_unless_they_mix",
    "test_other_inputs_have_keys_of_their_own_and_come_out_right",
    "test_n_outputs_are_right_in_order_and_seed",
    "test_parameters_of_one_family_alone",
    "test_every_default_equals_the_pipelines_own",
    "test_parameters_off_the_checkpoints_grid_are_refused",
}
"""What CI compares of a case that is `brief`: the first in both modes, the others by steps. All else runs in soak."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and _waits(item):
            item.add_marker(pytest.mark.soak)


def _waits(item: pytest.Function) -> bool:
    """Whether it is for soak: a case in another process, or more than the main things of a brief one."""
    case, name = item.callspec.params.get("case"), item.originalname
    if case is None:
        return False
    executor, mode = item.callspec.params.get("way", ("local", "step_batch"))
    if executor == "multiproc":
        return case.name not in IN_RANKS
    by_request = mode == "request_batch" and name != "test_in_a_batch_of_three_unlike_rows"
    if case.once:
        return by_request or name != "test_in_a_batch_of_three_unlike_rows"
    return case.brief and (name not in MAIN or by_request)


@pytest.fixture(scope="session", autouse=True)
def exact_float32() -> Iterator[None]:
    """On a GPU no product and no convolution in float32 is rounded to TF32, as torch lets convolutions be. CUDA's
    libraries, here and in the ranks, read the variable as they begin: so it is there before the first test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model's folder by family name, each built once."""
    folder = tmp_path_factory.mktemp("models")

    def model(family: str) -> Path:
        path = folder / family
        return path if path.exists() else make_tiny(family, path)

    return model


@pytest.fixture
def sd3(models: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of SD3's folder, to be changed or damaged."""
    return Path(shutil.copytree(models("sd3"), tmp_path / "sd3"))


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
