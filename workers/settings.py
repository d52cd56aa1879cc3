"""What one worker needs to know, from its environment and its command line. Checked once, then frozen."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from saggar.jobs.settings import JobSettings, Seconds, from_environment, variable, wrong_setting
from saggar.workers.inputs.policy import Limits, Policy, Source
from saggar.workers.warmups import Kind, Kinds

URGENT_SEATS = 2  # jobs in hand that only interactive jobs may take
HANDED_ON = "SAGGAR_WORKER_SETTINGS"
DEFAULT_MODEL = "saggar/emoji"
MOST_RANKS = 4096
MOST_BYTES = 1 << 60
MOST_PIXELS = 178_956_970  # above it Pillow refuses whatever we say
DEFAULT_CACHE = Path("saggar-data/models")
DEFAULT_CALIBRATION = "saggar-data/attention.json"

FLAGS = {"lease_s": "--lease", "grace_s": "--grace", "inputs_private_hosts": "--inputs-private-host"}
"""Those of another name than the field. Environment variables all have the field's: SAGGAR_LEASE_S."""
_OF_NO_VARIABLE = {"jobs", "role"}


def _listed(value: object) -> object:
    """`a,b` of an environment variable."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


Listed = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class WorkerSettings(BaseModel):
    """One worker: one engine with one model, fed from one lane, writing to one store."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    jobs: JobSettings
    role: Literal["model", "chores"] = "model"
    model: str = Field(
        DEFAULT_MODEL,
        min_length=1,
        description="a diffusers folder, a hub id, s3://bucket/folder or a built-in model",
    )
    model_name: str | None = Field(None, description="the public name jobs ask for; default: the model's own")
    model_cache: Path = Field(
        DEFAULT_CACHE, description="where models from S3 are kept; a hub's are in HF_HOME"
    )
    model_cache_gib: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="most GiB in there; default: no limit"
    )
    store: str = Field("saggar-data/results", min_length=1, description="s3://bucket/prefix or a folder")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    executor: Literal["multiproc", "local"] = "multiproc"
    attention: str = Field("", description="kernels by role, such as self=cudnn,cross=torch_sdpa")
    calibration_file: str = Field(
        DEFAULT_CALIBRATION, min_length=1, description="where attention's auto keeps what it found"
    )
    warmup: Kinds = Field((Kind(),), description="kinds of request that are tried before serving")
    ranks: int = Field(
        0,
        ge=0,
        le=MOST_RANKS,
        description="processes of all nodes that carry out each batch; 0: what the next three make",
    )
    vae_slicing: bool = Field(False, description="decode one picture after the other")
    vae_tiling: bool = Field(False, description="decode large pictures by overlapping tiles")
    compile: bool = Field(False, description="compile the denoiser's repeated blocks")
    cuda_graphs: bool = Field(False, description="record the denoiser's forward on the GPU and play it again")
    ulysses: int = Field(1, ge=1, le=MOST_RANKS, description="ranks that share each sequence by heads")
    ring: int = Field(1, ge=1, le=MOST_RANKS, description="ranks that share each sequence by chunks")
    cfg: int = Field(1, ge=1, le=MOST_RANKS, description="ranks that share the branches of guidance")
    nodes: int = Field(
        1, ge=1, le=MOST_RANKS, description="machines that the ranks live on; the worker's is the first"
    )
    node_address: str | None = Field(None, description="host:port at which the other nodes find this one")
    node_key_file: str | None = Field(None, description="holds the nodes' key; default: SAGGAR_NODE_KEY")
    max_batch: int = Field(8, ge=1, le=256, description="most rows of one batch")
    concurrency: int | None = Field(
        None, ge=1, le=1024, description="jobs in hand; default: 8 batches, at least 64"
    )
    spool: Path = Field(Path("saggar-data/spool"), description="where outputs are made durable before upload")
    spool_limit_bytes: int = Field(
        16 << 30, ge=1 << 20, le=MOST_BYTES, description="most bytes in the spool; full, it pauses the engine"
    )
    lease_s: Seconds = Field(60.0, ge=0.1, description="how long a job may be held without a sign of life")
    age_bound_s: Seconds = Field(60.0, gt=0, description="a key older than this begins the next batch")
    grace_s: Seconds = Field(30.0, ge=0, description="time for the running batch to finish after SIGTERM")
    watchdog_s: Seconds = Field(
        60.0,
        ge=0,
        description="a worker that does nothing for so long while jobs wait is started anew; 0: never",
    )
    max_restarts: int = Field(
        5, ge=0, le=10**6, description="crashes within ten minutes after which the worker gives up"
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    inputs_from: Listed = Field(
        (), description="where jobs' input files may lie, beside the uploads of the store: URLs that begin so"
    )
    inputs_private_hosts: Listed = Field(
        (), description="https hosts of inputs_from whose address may be of a private network"
    )
    inputs_max_bytes: int = Field(256 << 20, ge=1, le=MOST_BYTES, description="most bytes of one input file")
    inputs_max_pixels: int = Field(
        64 << 20, ge=1, le=MOST_PIXELS, description="most pixels of a picture or of a video's frame"
    )
    inputs_max_frames: int = Field(1024, ge=1, le=10**6, description="most frames of a video")
    inputs_max_seconds: Seconds = Field(120.0, gt=0, description="longest video or sound")
    inputs_timeout_s: Seconds = Field(60.0, gt=0, description="time for one file over https")
    inputs_memory_bytes: int = Field(
        4 << 30, ge=1 << 20, le=MOST_BYTES, description="most bytes of decoded inputs at a time"
    )

    @field_validator("inputs_from")
    @classmethod
    def _are_sources(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            Source.parse(text)
        return value

    @field_validator("calibration_file")
    @classmethod
    def _is_a_file(cls, value: str) -> str:
        if "\0" in value or value.endswith("/") or Path(value).is_dir():
            raise ValueError(f"{value[:100]!r} is a folder (allowed: the path of a file, there or not)")
        return value

    @field_validator("node_address")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is not None:
            from saggar.engine.checks import host_and_port  # not where only results are waited for

            host_and_port(value)
        return value

    @model_validator(mode="after")
    def _room_for_a_batch(self) -> Self:
        if self.in_hand < self.max_batch + URGENT_SEATS:
            raise ValueError(
                f"concurrency must be at least max_batch + {URGENT_SEATS}, or no batch could be full"
            )
        return self

    @model_validator(mode="after")
    def _nodes_find_each_other(self) -> Self:
        if self.nodes > 1 and not self.node_address:
            raise ValueError("several nodes need node_address, the host:port of this one")
        return self

    def input_policy(self, store_url: str) -> Policy:
        """What jobs may name, for a store of this URL."""
        return Policy.make(store_url, self.inputs_from, self.inputs_private_hosts)

    @property
    def input_limits(self) -> Limits:
        """Of one input file, and of all that are held."""
        return Limits(
            bytes=self.inputs_max_bytes,
            pixels=self.inputs_max_pixels,
            frames=self.inputs_max_frames,
            seconds=self.inputs_max_seconds,
            timeout_s=self.inputs_timeout_s,
            memory=self.inputs_memory_bytes,
        )

    @property
    def name(self) -> str:
        """The model's public name, as jobs write it."""
        return self.model_name or public_name(self.model)

    @property
    def model_cache_bytes(self) -> int | None:
        """The limit of the models' cache; None: there is none."""
        return None if self.model_cache_gib is None else round(self.model_cache_gib * (1 << 30))

    @property
    def in_hand(self) -> int:
        """How many jobs this worker may hold: the running batch, the next, and those that are being uploaded.

        The engine's room limits what it takes; so many in hand keep it busy while a slow store holds up uploads.
        """
        return self.concurrency or max(64, 8 * self.max_batch)

    @property
    def heartbeat_s(self) -> float:
        """How often a worker says that it lives: a few times within a lease, however short."""
        return min(3.0, self.lease_s / 4)

    @property
    def liveness_s(self) -> float:
        """A worker that is silent for so long is dead."""
        return 5 * self.heartbeat_s

    @property
    def owner(self) -> str:
        """The name this process signs its attempts with."""
        return f"{socket.gethostname()}:{os.getpid()}"

    @property
    def handed_on(self) -> str:
        """These settings for a child process of ours, secrets included: for its environment, never for a log."""
        return self.model_dump_json()

    @classmethod
    def from_parent(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """What `handed_on` gave. Raises KeyError outside such a child."""
        return cls.model_validate_json(environ[HANDED_ON])

    @classmethod
    def load(cls, flags: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> Self:
        """Flags over environment over defaults; an empty variable is not set. Raises ConfigError naming the flag or
        variable and what it takes."""
        fields = cls.model_fields.keys() - _OF_NO_VARIABLE
        values = from_environment(fields, environ)
        given = {name: value for name, value in flags.items() if value is not None}
        redis_url = given.pop("redis_url", None)
        names = {field: variable(field) for field in values}
        names |= {field: FLAGS.get(field, f"--{field.replace('_', '-')}") for field in given}
        values |= given
        if "jobs" not in values:
            above = {} if redis_url is None else {"redis_url": ("--redis", redis_url)}
            values["jobs"] = JobSettings.from_env(environ, above)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise wrong_setting(error, cls.model_fields, names) from None


def cache_settings(environ: Mapping[str, str] = os.environ) -> tuple[Path, int | None]:
    """Where models from S3 are kept, and how many bytes of them, as the environment says. Raises ConfigError."""
    names = [variable(field) for field in ("model_cache", "model_cache_gib")]
    settings = WorkerSettings.load({}, {name: environ[name] for name in names if name in environ})
    return settings.model_cache, settings.model_cache_bytes


def public_name(model: str) -> str:
    """A folder, here or in S3, goes by its last part, a hub id without its revision; built-in names stay."""
    if Path(model).is_dir():
        return Path(model).resolve().name
    if "://" in model:
        return model.rstrip("/").rpartition("/")[2]
    return model.partition("@")[0]
