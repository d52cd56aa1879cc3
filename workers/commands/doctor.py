"""`saggar doctor`: looks at everything a worker needs and says what to do about what is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import click
import redis
from saggar.jobs.errors import SaggarError
from saggar.jobs.settings import JobSettings, connect
from saggar.storage.base import open_storage
from saggar.storage.errors import StorageError
from saggar.workers.commands.jobs import job_settings
from saggar.workers.servers import ServerError, find_binary

_INSTALL = "pip install 'saggar[worker,embedded,s3]'"


@click.command()
@click.option(
    "--redis",
    "redis_url",
    envvar="SAGGAR_REDIS_URL",
    help="Also look at this Redis.  [env: SAGGAR_REDIS_URL]",
)
@click.option(
    "--store", envvar="SAGGAR_STORE", help="Also look at this store: s3://bucket/prefix or a folder."
)
def doctor(redis_url: str | None, store: str | None) -> None:
    """Check the installation, and the Redis and the store that are named. Exits 1 if something is wrong."""
    checks: list[tuple[str, Callable[[], str]]] = [("python packages", _packages)]
    works = find_spec("torch") is not None
    if works:
        checks += [
            ("accelerator", _accelerator),
            ("embedded Redis", find_binary),
            ("built-in models", _models),
            ("model cache", _cache),
        ]
    if redis_url is not None:
        checks.append(("redis", lambda: _redis(job_settings(redis_url))))
    if store is not None:
        checks.append(("store", lambda: _store(store)))
    failed = False
    for name, check in checks:
        try:
            click.echo(f"ok    {name:<16} {check()}")
        except (
            SaggarError,
            ServerError,
            StorageError,
            redis.RedisError,
            ImportError,
            PackageNotFoundError,
        ) as error:
            failed = True
            click.secho(f"FAIL  {name:<16} {error}", fg="red")
    if not works:
        click.echo(f"--    no torch here: this machine submits jobs and runs no worker; for one, {_INSTALL}")
    sys.exit(failed)


def _packages() -> str:
    wanted = ["saggar", "celery", "redis"]
    if find_spec("torch") is not None:
        wanted += ["torch", "diffusers", "transformers"]
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        raise ImportError(f"{', '.join(missing)} cannot be found: {_INSTALL}")
    return ", ".join(f"{name} {version(name)}" for name in wanted)


def _accelerator() -> str:
    from saggar.engine.config import EngineConfig
    from saggar.engine.platform.select import place

    placement, _ = place(EngineConfig(model="any"), slot=0)
    return f"{placement.device}, {placement.numerics}"


def _models() -> str:
    from saggar.engine.models.registry import installed

    return ", ".join(installed()) or "none"


def _cache() -> str:
    """Of models from S3, as the environment says."""
    from saggar.workers.model_cache import gib, held, states
    from saggar.workers.settings import cache_settings

    cache, limit = cache_settings()
    found = states(cache)
    used = sum(state.in_use for state in found)
    of = f"of {gib(limit)}" if limit is not None else "without a limit"
    return f"{len(found)} models from S3, {used} in use, {gib(held(cache))} {of}, in {cache}"


def _redis(settings: JobSettings) -> str:
    client = connect(settings)
    try:
        server, memory = client.info("server"), client.info("memory")
        policy = memory.get("maxmemory_policy", "noeviction")
        persisted = client.info("persistence").get("aof_enabled")
        fsync = _fsync(client)
    finally:
        client.close()
    notes = [f"Redis {server['redis_version']}"]
    if policy != "noeviction":
        notes.append(f"maxmemory-policy is {policy}: set it to noeviction, or jobs can vanish")
    if not persisted:
        notes.append("appendonly is off: a restart forgets the queue")
    elif fsync not in ("always", None):
        notes.append(
            f"appendfsync is {fsync}: a kill of the server can lose its last two seconds; set it to always"
        )
    return "; ".join(notes)


def _fsync(client: redis.Redis) -> str | None:
    """None where the server does not let itself be asked, as those that are rented often do not."""
    try:
        return client.config_get("appendfsync").get("appendfsync")
    except redis.ResponseError:
        return None


def _store(url: str) -> str:
    storage = open_storage(url)
    try:
        conditional = storage.probe()
    finally:
        storage.close()
    return f"{storage.url}, {'with' if conditional else 'without'} conditional PUT"
