"""What the ranks of a group must have in common before they work together, each thing under a name that an error can
say. A rank on another machine may have other weights, other libraries or another numerics than it should.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

from saggar.engine.config import EngineConfig
from saggar.engine.models.packages import package_of
from saggar.engine.models.registry import AnyFamily

_LIBRARIES = ("saggar", "numpy")
_WITH_TORCH = ("torch", "diffusers", "transformers")


def agreement(config: EngineConfig, family: AnyFamily, numerics: str) -> dict[str, str]:
    """Of a loaded rank: `weights` (the checkpoint's revision), `numerics`, `plan`, `versions`, and what the family's
    probe says: `tokens` of a prompt, `noise` of a seed.
    """
    return {
        "weights": family.checkpoint.revision,
        "plan": plan_digest(config),
        "versions": versions(family.uses_torch, package_of(type(family))),
        "numerics": numerics,
        **family.probe(),
    }


def plan_digest(config: EngineConfig) -> str:
    """A digest of all that a rank was told: how many ranks, mode, dtype, device, batch, warm-up.

    The model's path is left out, for it is the weights that count.
    """
    told = {name: value for name, value in asdict(config).items() if name != "model"}
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def versions(with_torch: bool, plugin: str = "") -> str:
    """Python, this package and the libraries that compute, with their versions; the family's plug-in if it has one."""
    names = _LIBRARIES + (_WITH_TORCH if with_torch else ())
    found = [f"{name} {_version(name)}" for name in names]
    return ", ".join([f"python {platform.python_version()}", *found, *filter(None, [plugin])])


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Where the other side differs, in words: name, its value, mine."""
    return [
        f"{name} ({theirs.get(name, 'nothing')}, not {mine.get(name, 'nothing')})"
        for name in {**mine, **theirs}
        if mine.get(name) != theirs.get(name)
    ]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # run from a folder that is not installed
        return "unknown"
