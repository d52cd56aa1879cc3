"""What a model's worker is made of, by its settings: its engine's configuration, its lane, its store, its spool."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from saggar.engine.choices import parse_attention
from saggar.engine.config import EngineConfig, Nodes, WarmUp
from saggar.engine.models.registry import open_family
from saggar.engine.models.source.huggingface import split_id
from saggar.jobs.errors import ConfigError
from saggar.jobs.lanes import LaneSettings
from saggar.jobs.schema import is_model_name
from saggar.storage.base import Storage, StorageSettings, open_storage
from saggar.storage.spool import Spool
from saggar.workers.model_source import is_remote
from saggar.workers.settings import WorkerSettings

MAX_DELIVERIES = 20
"""A net for messages that end their worker before the ledger hears of them: crashes of jobs are counted there."""


def check(settings: WorkerSettings) -> None:
    """What can be known to be wrong here is told before any server is waited for.

    Raises ConfigError, Unsupported, LoadError.
    """
    engine_config(settings, settings.model)
    if not is_remote(settings.model) and split_id(settings.model) is None:
        open_family(settings.model)
    if not is_model_name(settings.name):
        raise ConfigError(
            f"no job can ask for a model called {settings.name!r}: rename its folder, or give --model-name (allowed: "
            "letters, digits and . _ - that begin with a letter or digit, up to four such parts between slashes)"
        )


def engine_config(settings: WorkerSettings, model: str) -> EngineConfig:
    """`model`: as the engine takes it. Raises Unsupported."""
    return EngineConfig(
        model=model,
        device=settings.device,
        dtype=settings.dtype,
        executor=settings.executor,
        ranks=settings.ranks,
        attention=parse_attention(settings.attention),
        vae_slicing=settings.vae_slicing,
        vae_tiling=settings.vae_tiling,
        compile=settings.compile,
        cuda_graphs=settings.cuda_graphs,
        calibration_file=settings.calibration_file,
        warmup=tuple(WarmUp(kind.params, kind.rows, kind.negative_prompt) for kind in settings.warmup),
        ulysses=settings.ulysses,
        ring=settings.ring,
        cfg=settings.cfg,
        nodes=_nodes(settings),
        max_batch=settings.max_batch,
        age_bound_s=settings.age_bound_s,
    )


def _nodes(settings: WorkerSettings) -> Nodes | None:
    if settings.nodes == 1:
        return None
    return Nodes(settings.nodes, settings.node_address or "", settings.node_key_file)


def lane_settings(settings: WorkerSettings) -> LaneSettings:
    """What the lane is told of this worker."""
    return LaneSettings(
        max_batch=settings.max_batch,
        age_bound_s=settings.age_bound_s,
        lease_s=settings.lease_s,
        liveness_s=settings.liveness_s,
        max_deliveries=MAX_DELIVERIES,
    )


def open_store(settings: WorkerSettings) -> Storage:
    """With a connection for each job in hand."""
    ours = StorageSettings.from_env()
    most = max(ours.max_connections, settings.in_hand)
    return open_storage(settings.store, ours.model_copy(update={"max_connections": most}))


def own_spool(settings: WorkerSettings, storage: Storage, stack: ExitStack) -> Spool | None:
    """Until the stack ends; a store in a folder needs none."""
    if storage.url.startswith("file:"):
        return None
    spool = Spool.claim(Path(settings.spool), settings.spool_limit_bytes)
    stack.callback(spool.close)
    return spool
