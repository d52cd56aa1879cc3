"""What the engine needs to know of a machine. One file a platform; `torch.cuda` is used in
none but cuda.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from saggar.engine.config import Pixels


@dataclass(frozen=True)
class Placement:
    """Where and how a family's weights live. `device` and `dtype` are None for families without torch.

    `prompt_cache_bytes` of the device's memory may hold encoded prompts.
    """

    pixels: Pixels
    numerics: str
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    prompt_cache_bytes: int = 0


class Platform(Protocol):
    """A kind of device. Importing its module imports torch; a rank does that, the engine's
    process does not.
    """

    kind: str
    communication: str
    attention: Sequence[str]
    """Its attention kernels, the best first."""

    def available(self) -> bool:
        """Whether this machine has such a device."""

    def device(self, index: int) -> torch.device:
        """The device of a local rank; makes it the current one."""

    def name(self, device: torch.device) -> str:
        """What it is called, such as "NVIDIA H200"."""

    def settle(self) -> None:
        """Wait until the device has done all that it was told."""

    def default_dtype(self) -> torch.dtype:
        """The dtype of `auto`."""

    def set_threads(self, threads: int | None) -> None:
        """CPU threads of this process."""

    def record(self, module: torch.nn.Module) -> None:
        """From now on its forward is recorded once for each kind of inputs and played again. Unsupported: not here."""

    def forget(self) -> None:
        """Let go of what was recorded, before the ranks part."""

    def free_cache(self) -> None:
        """Give unused memory back to the device."""

    def out_of_memory(self) -> tuple[type[BaseException], ...]:
        """The exceptions that mean it."""
