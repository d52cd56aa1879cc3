"""NVIDIA GPUs as a platform: bfloat16, NCCL. This file and cuda_graphs.py alone name torch.cuda."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from saggar.engine.platform.cuda_graphs import Graphed


class Cuda:
    """See platform.base.Platform."""

    kind = "cuda"
    communication = "nccl"
    attention: Sequence[str] = ("torch_sdpa",)

    def __init__(self) -> None:
        self._recorded: list[Graphed] = []

    def available(self) -> bool:
        """At least one GPU and a torch that can use it."""
        return torch.cuda.is_available()

    def device(self, index: int) -> torch.device:
        """GPU `index` of those that this process sees."""
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        return device

    def name(self, device: torch.device) -> str:
        """The card's."""
        return torch.cuda.get_device_name(device)

    def settle(self) -> None:
        """Of the current GPU."""
        torch.cuda.synchronize()

    def default_dtype(self) -> torch.dtype:
        """bfloat16."""
        return torch.bfloat16

    def set_threads(self, threads: int | None) -> None:
        """CPU threads of one operation; the GPU does not care."""
        if threads is not None:
            torch.set_num_threads(threads)

    def record(self, module: torch.nn.Module) -> None:
        """As CUDA graphs."""
        graphed = Graphed(module.forward, type(module).__name__)
        self._recorded.append(graphed)
        module.forward = graphed

    def forget(self) -> None:
        """CUDA graphs hold the communicators whose calls they recorded."""
        for graphed in self._recorded:
            graphed.forget()

    def free_cache(self) -> None:
        """Return cached blocks to the driver."""
        torch.cuda.empty_cache()

    def out_of_memory(self) -> tuple[type[BaseException], ...]:
        """torch's own class."""
        return (torch.cuda.OutOfMemoryError,)
