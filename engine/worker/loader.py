"""From a configuration to a runner that is ready: family, device, weights, warm-up."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from saggar.engine.config import EngineConfig
from saggar.engine.errors import EngineError, LoadError, Unsupported
from saggar.engine.models.registry import AnyFamily, open_family
from saggar.engine.models.source.checkpoint import readable
from saggar.engine.parallel.cfg import OverRanks
from saggar.engine.parallel.mesh import Mesh
from saggar.engine.platform.base import Placement
from saggar.engine.worker.agreement import agreement, versions
from saggar.engine.worker.extension import Extension, make_extension
from saggar.engine.worker.limits import RowLimits
from saggar.engine.worker.plan import Ready
from saggar.engine.worker.pulse import Activity
from saggar.engine.worker.runner import Runner
from saggar.engine.worker.team import Team

if TYPE_CHECKING:
    from saggar.engine.parallel.attach import Attachment
    from saggar.engine.platform.base import Platform

log = logging.getLogger(__name__)


def load(
    config: EngineConfig,
    team: Team | None = None,
    activity: Activity | None = None,
    row_limits: Mapping[str, int] | None = None,
    mesh: Mesh | None = None,
) -> tuple[Runner, Ready]:
    """Load the model of `config` in this process, one rank of `mesh`. Raises LoadError (also where ranks differ),
    Unsupported, or what the team does. `row_limits`: see plan.Start.
    """
    try:
        return _load(config, team, activity, row_limits, mesh)
    except (LoadError, Unsupported) as error:
        if _is_unforeseen(error):
            log.exception("the model cannot be loaded")
        raise


def _is_unforeseen(error: BaseException) -> bool:
    """Whether something else than the system's or our own words is behind it: a library or a plug-in may be at fault,
    and one line does not say where.
    """
    while isinstance(error, EngineError) and error.__cause__ is not None:
        error = error.__cause__
    return not isinstance(error, EngineError | OSError)


def _load(
    config: EngineConfig,
    team: Team | None,
    activity: Activity | None,
    row_limits: Mapping[str, int] | None,
    mesh: Mesh | None,
) -> tuple[Runner, Ready]:
    team, mesh = team or Team(0), mesh or Mesh.alone()
    family = open_family(config.model)
    extension = make_extension(config.worker_extension, family, team.rank)
    make = _with_torch if family.uses_torch else _plain
    loaded = make(config, family, extension, team.slot, mesh)
    runner = loaded.runner
    runner.activity = activity or runner.activity
    runner.limits = RowLimits(config.max_batch, row_limits)
    runner.alike = team.alike
    agreed = agreement(config, family, loaded.numerics())
    team.compare(agreed)
    loaded.calibrate(team, partial(_warm_up, config, runner, team))
    loaded.quicken()
    _warm_up(config, runner, team)
    return runner, Ready(team.rank, os.getpid(), loaded.numerics(), family.checkpoint.revision, agreed)


def _warm_up(config: EngineConfig, runner: Runner, team: Team) -> None:
    end = time.monotonic() + config.warmup_limit_s
    for kind in config.warmup:
        late = time.monotonic() >= end
        if not team.agree((), ("late",) if late else ()):
            runner.warm_up(kind)


@dataclass(frozen=True)
class _Loaded:
    """`calibrate` chooses kernels that are to be found by trying, with a warm-up; `quicken` comes after it."""

    runner: Runner
    numerics: Callable[[], str]
    calibrate: Callable[[Team, Callable[[], None]], None] = lambda team, warm_up: None
    quicken: Callable[[], None] = lambda: None


def _plain(config: EngineConfig, family: AnyFamily, extension: Extension, slot: int, mesh: Mesh) -> _Loaded:
    for wish in ("compile", "cuda_graphs", "vae_slicing", "vae_tiling", "attention"):
        if getattr(config, wish):
            raise Unsupported(f"{wish} says nothing to {family.name}, a family without torch: leave it out")
    placement = Placement(config.pixels, numerics="exact")
    with readable(family.checkpoint.folder, named=True):
        family.load(placement)
    return _Loaded(Runner(family, config.max_batch, extension=extension), lambda: placement.numerics)


def _with_torch(
    config: EngineConfig, family: AnyFamily, extension: Extension, slot: int, mesh: Mesh
) -> _Loaded:
    import torch
    from saggar.engine.memory.decode import spare_memory
    from saggar.engine.parallel.attach import Attachment
    from saggar.engine.parallel.tiles import share_tiles
    from saggar.engine.platform.select import place

    placement, platform = place(config, slot)
    with readable(family.checkpoint.folder, named=True):
        family.load(placement)
    spare_memory(config, family)
    if config.vae_tiling:
        for decoder in family.decoders().values():
            share_tiles(decoder, mesh.all)
    attachment = Attachment(config.kernels, platform.attention, mesh, family.sequence_plan, family.masks)
    for denoiser in family.denoisers().values():
        attachment.put_on(denoiser)
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
    settled = {"tiled": config.vae_tiling, "compiled": config.compile}
    changed = [word for word, on in settled.items() if on]
    return _Loaded(
        runner,
        numerics=lambda: "/".join([placement.numerics, attachment.numerics, *changed]),
        calibrate=partial(_calibrate, config, attachment, placement, platform),
        quicken=partial(_quicken, config, family, platform),
    )


def _calibrate(
    config: EngineConfig,
    attachment: Attachment,
    placement: Placement,
    platform: Platform,
    team: Team,
    warm_up: Callable[[], None],
) -> None:
    """Rank 0 tries the kernels of the shapes that its warm-up brought, or knows them from its file."""
    from saggar.engine.attention.auto import Calibration, calibrate, timer

    if not attachment.autos:
        return
    warm_up()
    if team.leads:
        assert placement.device is not None and placement.dtype is not None
        tried = sorted({name for auto in attachment.autos for name in auto.candidates})
        machine = ", ".join(
            [platform.name(placement.device), placement.numerics, versions(True), "/".join(tried)]
        )
        file = Calibration(Path(config.calibration_file), machine)
        measure = timer(placement.device, placement.dtype, platform.settle, time.perf_counter)
        table = calibrate(attachment.autos, known := file.read(), measure)
        if not table.items() <= known.items():
            file.add(table)
        team.tell(table)
    else:
        table = cast("dict[str, str]", team.hear())
    for auto in attachment.autos:
        auto.serve_by(table)


def _quicken(config: EngineConfig, family: AnyFamily, platform: Platform) -> None:
    """Compiling and recording come last: what they see stays as it is."""
    from saggar.engine.memory.compile import compile_blocks

    for denoiser in family.denoisers().values():
        if config.compile:
            compile_blocks(denoiser)
        if config.cuda_graphs:
            platform.record(denoiser)
