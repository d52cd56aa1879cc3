"""Which platform and device a rank gets. Importing this imports torch."""

from __future__ import annotations

import torch
from saggar.engine.config import EngineConfig
from saggar.engine.errors import Unsupported
from saggar.engine.platform.base import Placement, Platform
from saggar.engine.platform.cpu import Cpu
from saggar.engine.platform.cuda import Cuda


def place(config: EngineConfig, slot: int) -> tuple[Placement, Platform]:
    """The placement of a rank by its place among all; a device's number in the configuration is the first one's.

    Unsupported: the device does not exist here, or the dtype does not go with it.
    """
    kind, _, index = config.device.partition(":")
    platform: Platform = Cuda() if kind in ("auto", "cuda") and Cuda().available() else Cpu()
    if kind not in ("auto", platform.kind):
        raise Unsupported(f"device {config.device} was asked for, and this machine has none")
    platform.set_threads(config.threads)
    device = platform.device(int(index or 0) + slot)
    dtype = platform.default_dtype() if config.dtype == "auto" else getattr(torch, config.dtype)
    numerics = f"{str(dtype).removeprefix('torch.')}/{platform.kind}"
    return Placement(config.pixels, numerics, device, dtype, config.prompt_cache_mb << 20), platform
