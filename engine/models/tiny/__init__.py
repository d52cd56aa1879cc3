"""Builds tiny checkpoints with random weights, for tests and for trying things out: their pictures are noise.

The parts are of the real classes, so that a tiny model takes the same paths as a large one. One module a model, found
by its name: `build(folder, seed)` writes it.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from saggar.engine.errors import Unsupported

_SUPPORT = {"parts", "qwen_parts"}


def tiny_models() -> list[str]:
    """The names that `make_tiny` knows."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [name.replace("_", "-") for name in names if name not in _SUPPORT]


def make_tiny(model: str, folder: Path | str, seed: int = 0) -> Path:
    """Write a tiny checkpoint of a model into `folder`. Unsupported lists the models that can be made."""
    if model not in tiny_models():
        raise Unsupported(f"no tiny model of {model!r}: there are {', '.join(tiny_models())}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    importlib.import_module(f"{__name__}.{model.replace('-', '_')}").build(folder, seed)
    return folder
