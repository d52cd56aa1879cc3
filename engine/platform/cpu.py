"""The CPU as a platform: float32, gloo."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch
from saggar.engine.errors import Unsupported


class Cpu:
    """See platform.base.Platform."""

    kind = "cpu"
    communication = "gloo"
    attention: Sequence[str] = ("torch_sdpa",)

    def available(self) -> bool:
        """Always."""
        return True

    def device(self, index: int) -> torch.device:
        """There is one CPU device, whatever the rank."""
        return torch.device("cpu")

    def name(self, device: torch.device) -> str:
        """The processor's architecture."""
        return platform.machine()

    def settle(self) -> None:
        """It works at once."""

    def default_dtype(self) -> torch.dtype:
        """float32."""
        return torch.float32

    def set_threads(self, threads: int | None) -> None:
        """Threads of one operation."""
        if threads is not None:
            torch.set_num_threads(threads)

    def record(self, module: torch.nn.Module) -> None:
        """There is nothing to record."""
        raise Unsupported("cuda_graphs: this rank runs on the CPU; leave it out, or set device=cuda")

    def forget(self) -> None:
        """Nothing was recorded."""

    def free_cache(self) -> None:
        """The allocator keeps none that it could give back."""

    def out_of_memory(self) -> tuple[type[BaseException], ...]:
        """Python's own; torch's CPU allocator raises a plain RuntimeError, told by its text."""
        return (MemoryError,)
