"""A tiny FLUX.1 as schnell is: without guidance, its sampler's shift not the resolution's."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny import flux


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    flux.build(folder, seed, guidance=False, scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0))
