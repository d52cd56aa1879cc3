"""From a configuration to a runner that is ready: family, device, weights, warm-up."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from saggar.engine.config import EngineConfig
from saggar.engine.models.registry import AnyFamily, open_family
from saggar.engine.parallel.cfg import OverRanks
from saggar.engine.parallel.mesh import Mesh
from saggar.engine.platform.base import Placement
from saggar.engine.worker.agreement import agreement
from saggar.engine.worker.extension import Extension, make_extension
from saggar.engine.worker.limits import RowLimits
from saggar.engine.worker.plan import Ready
from saggar.engine.worker.pulse import Activity
from saggar.engine.worker.runner import Runner
from saggar.engine.worker.team import Team


def load(
    config: EngineConfig,
    team: Team | None = None,
    activity: Activity | None = None,
    row_limits: Mapping[str, int] | None = None,
    mesh: Mesh | None = None,
) -> tuple[Runner, Ready]:
    """Load the model of `config` in this process, one rank of `mesh`. Raises LoadError (also where ranks differ),
    Unsupported, or what the warm-up raises. `row_limits`: see plan.Start.
    """
    team, mesh = team or Team(0), mesh or Mesh.alone()
    family = open_family(config.model)
    extension = make_extension(config.worker_extension, family, team.rank)
    make = _with_torch if family.uses_torch else _plain
    runner, numerics = make(config, family, extension, team.slot, mesh)
    runner.activity = activity or runner.activity
    runner.limits = RowLimits(config.max_batch, row_limits)
    runner.alike = team.alike
    agreed = agreement(config, family, numerics)
    team.compare(agreed)
    end = time.monotonic() + config.warmup_limit_s
    for kind in config.warmup:
        late = time.monotonic() >= end
        if not team.agree((), ("late",) if late else ()):
            runner.warm_up(kind)
    return runner, Ready(team.rank, os.getpid(), numerics, family.checkpoint.revision, agreed)


def _plain(
    config: EngineConfig, family: AnyFamily, extension: Extension, slot: int, mesh: Mesh
) -> tuple[Runner, str]:
    placement = Placement(config.pixels, numerics="exact")
    family.load(placement)
    return Runner(family, config.max_batch, extension=extension), placement.numerics


def _with_torch(
    config: EngineConfig, family: AnyFamily, extension: Extension, slot: int, mesh: Mesh
) -> tuple[Runner, str]:
    import torch
    from saggar.engine.memory.compile import compile_blocks
    from saggar.engine.parallel.attach import Attachment
    from saggar.engine.platform.select import place

    placement, platform = place(config, slot)
    family.load(placement)
    attachment = Attachment(config.kernels, platform.attention, mesh, family.sequence_plan, family.masks)
    for denoiser in family.denoisers().values():
        attachment.put_on(denoiser)
        if config.compile:
            compile_blocks(denoiser)
        if config.cuda_graphs:
            platform.record(denoiser)
    if mesh.cfg.size > 1:
        assert placement.device is not None
        family.spread = OverRanks(mesh.cfg, placement.device)
    runner = Runner(
        family,
        config.max_batch,
        memory_errors=platform.out_of_memory(),
        context=torch.inference_mode,
        extension=extension,
        free_memory=platform.free_cache,
        close=platform.forget,
    )
    parts = [placement.numerics, attachment.numerics, *(["compiled"] if config.compile else [])]
    return runner, "/".join(parts)
