"""`saggar worker`: one supervised Celery worker with one engine, or the worker for chores."""

from __future__ import annotations

import logging
import os
import sys
from importlib.util import find_spec

import click

NEEDED = ("numpy", "PIL", "av", "soundfile")
"""Imported by every worker, whatever it serves."""


@click.command()
@click.option(
    "--model",
    help="A diffusers folder, a hub id, s3://bucket/folder or a built-in model.  [default: saggar/emoji]",
)
@click.option("--model-name", help="The name that jobs ask for.  [default: the model's own]")
@click.option("--model-cache", help="Where models from S3 are kept.  [default: saggar-data/models]")
@click.option("--model-cache-gib", type=float, help="Most GiB in there.  [default: no limit]")
@click.option("--store", help="s3://bucket/prefix or a folder.  [default: saggar-data/results]")
@click.option("--redis", "redis_url", help="redis://, rediss:// or unix:// URL.  [env: SAGGAR_REDIS_URL]")
@click.option("--device", help="auto, cpu, cuda or cuda:N.")
@click.option("--dtype", help="auto, float32, bfloat16 or float16.")
@click.option(
    "--executor", type=click.Choice(["multiproc", "local"]), help="Ranks as processes, or in the worker."
)
@click.option(
    "--attention", help="Kernels by role, such as self=cudnn,cross=torch_sdpa; default=auto measures."
)
@click.option("--vae-slicing", is_flag=True, default=None, help="Decode one picture after the other.")
@click.option("--vae-tiling", is_flag=True, default=None, help="Decode large pictures by tiles.")
@click.option("--compile", is_flag=True, default=None, help="Compile the denoiser's repeated blocks.")
@click.option("--cuda-graphs", is_flag=True, default=None, help="Record the denoiser's forward on the GPU.")
@click.option("--calibration-file", help="Where attention's auto keeps what it found.")
@click.option(
    "--warmup",
    multiple=True,
    callback=lambda _ctx, _option, value: value or None,
    metavar="NAME=VALUE,...",
    help="A kind of request that is tried before serving: height=1024,width=1024,rows=4; or none. Repeat it.",
)
@click.option("--ulysses", type=int, help="Ranks that share each sequence by heads.  [default: 1]")
@click.option("--ring", type=int, help="Ranks that share each sequence by chunks.  [default: 1]")
@click.option("--cfg", type=int, help="Ranks that share the branches of guidance.  [default: 1]")
@click.option("--nodes", type=int, help="Machines that the ranks live on: see `saggar node`.  [default: 1]")
@click.option("--node-address", help="host:port at which the other nodes find this one.")
@click.option("--node-key-file", help="Holds the nodes' shared key.  [env: SAGGAR_NODE_KEY, the key itself]")
@click.option("--max-batch", type=int, help="Most rows of one batch.  [default: 8]")
@click.option("--concurrency", type=int, help="Most jobs in hand.  [default: 64 or more]")
@click.option("--spool", help="Where outputs are made durable before upload.")
@click.option(
    "--lease", "lease_s", type=float, help="Seconds a job is held without a sign of life.  [default: 60]"
)
@click.option(
    "--grace", "grace_s", type=float, help="Seconds to finish the running batch at SIGTERM.  [default: 30]"
)
@click.option(
    "--inputs-from",
    multiple=True,
    callback=lambda _ctx, _option, value: value or None,
    metavar="URL",
    help="Where jobs' input files may lie: s3://bucket/folder, file:///folder, https://host/folder. Repeat it.",
)
@click.option(
    "--inputs-private-host",
    "inputs_private_hosts",
    multiple=True,
    callback=lambda _ctx, _option, value: value or None,
    metavar="HOST",
    help="An https host of --inputs-from that may have a private address.",
)
@click.option("--inputs-max-bytes", type=int, help="Most bytes of an input file.  [default: 256 MiB]")
@click.option("--inputs-max-pixels", type=int, help="Most pixels of a picture or frame.  [default: 64 Mi]")
@click.option("--inputs-max-frames", type=int, help="Most frames of an input video.  [default: 1024]")
@click.option("--inputs-max-seconds", type=float, help="Longest input video or sound.  [default: 120]")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
@click.option("--chores", is_flag=True, help="No model: intake, sweeps and reconciling.")
def worker(chores: bool, **flags: object) -> None:
    """Serve one model from Redis: take compatible jobs, make them in batches, store the results.

    Flags stand above environment variables; docs/operating.md lists those.
    """
    for name in NEEDED:
        if find_spec(name) is None:  # or the process that works would end, and be started again, five times
            raise ModuleNotFoundError(name, name=name)
    from saggar.workers.settings import HANDED_ON, WorkerSettings
    from saggar.workers.supervisor import LOG_FORMAT, Supervisor

    settings = WorkerSettings.load(flags | ({"role": "chores"} if chores else {}))
    logging.basicConfig(level=settings.log_level.upper(), format=LOG_FORMAT)
    environ = os.environ | {HANDED_ON: settings.handed_on}
    sys.exit(Supervisor.of(settings, environ).run())
