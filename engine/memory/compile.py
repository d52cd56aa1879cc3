"""torch.compile of a denoiser's repeated blocks: one of each kind is compiled, and serves all of that kind.

Regional compilation as PyTorch's recipe has it: seconds instead of minutes. What a block is says diffusers
(`_repeated_blocks`), else the members of the denoiser's own lists of modules are taken for it.
"""

from __future__ import annotations

import torch
from saggar.engine.errors import Unsupported


def compile_blocks(denoiser: torch.nn.Module) -> int:
    """How many blocks are compiled from now on, at their first forward of each shape. Unsupported: there are none."""
    found = blocks(denoiser)
    if not found:
        raise Unsupported(f"compile: {type(denoiser).__name__} has no repeated blocks")
    for block in found:  # not what a plan's hooks do around it, by which the first and the last would differ
        block.forward = torch.compile(block.forward)
    return len(found)


def blocks(denoiser: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated blocks."""
    names = getattr(denoiser, "_repeated_blocks", None)
    if names:
        return [module for module in denoiser.modules() if type(module).__name__ in names]
    return [
        block
        for child in denoiser.children()
        if isinstance(child, torch.nn.ModuleList)
        for block in child
        if not isinstance(block, torch.nn.ModuleList)
    ]
