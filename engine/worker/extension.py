"""What can be asked of a rank besides plans: measurements, and methods of one's own.

A class named by `EngineConfig.worker_extension` adds methods; each is called between two plans, in the rank's thread.
"""

from __future__ import annotations

import importlib
import os
import resource
from pathlib import Path
from typing import Any

from saggar.engine.errors import Unsupported
from saggar.engine.models.base import Family


class Extension:
    """`family` is the loaded model. Arguments and results must be picklable."""

    def __init__(self, family: Family[Any, Any, Any], rank: int) -> None:
        self.family = family
        self.rank = rank
        self._profiler: Any = None

    def memory(self) -> dict[str, int]:
        """The process's largest resident size so far, in bytes."""
        return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}

    def start_profile(self) -> None:
        """Record what torch does from now on. Unsupported: a model without torch, or it records already."""
        if not self.family.uses_torch or self._profiler is not None:
            raise Unsupported("there is nothing to profile, or a profile is being recorded")
        import torch

        self._profiler = torch.profiler.profile()
        self._profiler.start()

    def stop_profile(self, folder: str) -> str:
        """End the recording and write it as a Chrome trace; returns the file's path."""
        if self._profiler is None:
            raise Unsupported("no profile is being recorded")
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        path = Path(folder) / f"rank{self.rank}-{os.getpid()}.trace.json"
        profiler.export_chrome_trace(str(path))
        return str(path)


def make_extension(name: str | None, family: Family[Any, Any, Any], rank: int) -> Extension:
    """The extension that a dotted name such as `package.module.Class` means. Unsupported: there is none."""
    if name is None:
        return Extension(family, rank)
    module, _, attribute = name.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise Unsupported(f"worker_extension {name}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Extension)):
        raise Unsupported(f"worker_extension {name} is no subclass of Extension")
    return kind(family, rank)
