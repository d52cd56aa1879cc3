"""How an engine is set up: one frozen data class, checked once, at construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

from saggar.engine.checks import check_count, check_kind, check_number, host_and_port
from saggar.engine.choices import Choice, checked
from saggar.engine.degrees import Degrees, refuse
from saggar.engine.errors import Unsupported
from saggar.engine.request import ParamValue

ExecutorKind = Literal["multiproc", "local"]
Mode = Literal["request_batch", "step_batch"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Pixels = Literal["uint8", "float32"]
_TIMES = ("admission_wait_s", "admission_quiet_s", "reservation_hold_s", "age_bound_s", "warmup_limit_s")


@dataclass(frozen=True)
class WarmUp:
    """One kind of request that a rank runs before it says that it is ready: shape and guidance by `params`."""

    params: Mapping[str, ParamValue] = field(default_factory=dict)
    rows: int = 1
    negative_prompt: str | None = None

    def __post_init__(self) -> None:
        check_kind("warmup.params", self.params, Mapping, "a mapping")
        check_count("warmup.rows", self.rows)
        if self.negative_prompt is not None:
            check_kind("warmup.negative_prompt", self.negative_prompt, str, "a text or None")


@dataclass(frozen=True)
class Patience:
    """When a rank counts as lost, and how often its group is started anew; times in seconds.

    pulse_s: how often a rank tells that it lives, from a thread of its own. silence_s: it is lost when it told
    nothing for so long and used no processor time either. A rank that failed waits as long for the others of its
    group to fail alike.
    progress_s, progress_factor: one verb may take progress_s, or progress_factor × the slowest seen of the same
    verb and shape, whichever is longer; first_s is the least for a shape that was never seen. While a group loads
    and warms up there is no such limit.
    failures, failures_within_s: so many failures within that time, none of its requests done between them, and no
    other start is tried.
    backoff_s: the wait before the first new start; it doubles.
    """

    pulse_s: float = 1.0
    silence_s: float = 10.0
    progress_s: float = 120.0
    progress_factor: float = 20.0
    first_s: float = 1800.0
    failures: int = 3
    failures_within_s: float = 600.0
    backoff_s: float = 0.5

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check = check_count if name == "failures" else partial(check_number, above=True)
            check(f"patience.{name}", value)


@dataclass(frozen=True)
class Nodes:
    """A group of ranks over `count` machines. The engine's own is node 0: it listens at `address` (host:port), by which
    the agents of the others find it (executor/agent.py), and has the first ranks / count of the ranks.

    key_file: holds the key that all nodes share, None for the environment's SAGGAR_NODE_KEY.
    """

    count: int
    address: str
    key_file: str | None = None

    def __post_init__(self) -> None:
        check_count("nodes.count", self.count, 2)
        check_kind("nodes.address", self.address, str, "host:port")
        if self.key_file is not None:
            check_kind("nodes.key_file", self.key_file, str, "a path as text or None")
        try:
            host_and_port(self.address)
        except ValueError:
            raise Unsupported(f"nodes.address must be host:port, not {self.address!r}") from None

    @property
    def host(self) -> str:
        """Node 0, as the others name it."""
        return host_and_port(self.address)[0]

    @property
    def port(self) -> int:
        """Where node 0 listens."""
        return host_and_port(self.address)[1]


_KINDS: tuple[tuple[str, type, str], ...] = (
    ("model", str, "a text"),
    ("device", str, "auto, cpu, cuda or cuda:N"),
    ("calibration_file", str, "a path as text"),
    ("warmup", tuple, "a tuple of WarmUp"),
    ("attention", Mapping, "a mapping of roles to kernels"),
    ("patience", Patience, "a Patience"),
    *((name, bool, "true or false") for name in ("vae_slicing", "vae_tiling", "compile", "cuda_graphs")),
)
_KINDS_OR_NONE: tuple[tuple[str, type, str], ...] = (
    ("worker_extension", str, "a dotted name"),
    ("nodes", Nodes, "a Nodes"),
)


@dataclass(frozen=True)
class EngineConfig:
    """`model` is a folder, a hub id (`org/name` or `org/name@revision`) or a known name such as `saggar/emoji`.

    executor: `multiproc` keeps the model in processes of its own; `local` runs it in this one.
    mode: `step_batch` lets requests join and leave between steps; `request_batch` closes a batch when it
    starts.
    max_batch: rows of one forward. max_cost: rows × branches × tokens of one forward, None for no limit.
    admission_wait_s: an idle engine waits this long for company; a pause of admission_quiet_s ends it early.
    reservation_hold_s: how long a batch is held open for requests that were announced and have not arrived.
    age_bound_s: a key whose oldest request waited longer goes before fuller ones.
    ageing_s: each such span that a request waits lifts it by one priority class.
    pass_limit: how often smaller requests may overtake one that does not fit.
    decode_rows: rows decoded between two steps while others run.
    warmup: run one step and decode of each before serving; a failure is a failure to start. When the limit is
    passed the rest is left out.
    threads: CPU threads of each rank, None for the library's choice.
    prompt_cache_mb: memory of each rank's device that may hold encoded prompts, 0 for none.
    worker_extension: dotted name of a subclass of worker.extension.Extension, for `Engine.call`.
    ulysses, ring: ranks that share each sequence, by heads and by chunks of keys; the product of both shares it.
    calibration_file: where `attention` auto keeps what it found.
    attention: the kernel of each role, of a category (`self`, `cross`) or `default`; the rest is the platform's.
    vae_slicing: decode one picture of a batch after the other, which takes less memory and gives the same.
    vae_tiling: decode large pictures by overlapping tiles, whose seams are blended; the pictures differ a little.
    compile: compile the denoiser's repeated blocks, each at its first forward of a shape.
    cuda_graphs: record a denoiser's forward for each kind of inputs and play it again; on GPUs alone.
    cfg: ranks that share the branches of guidance, or the rows where there are none.
    ranks: processes that carry out each batch together, `multiproc` only; 0: as many as the degrees make. Without
    any degree all ranks do the same, which is for families without torch.
    replicas: groups of ranks, each with a model of its own, that share the work.
    nodes: where the ranks of the one replica live on several machines, None for this one.
    patience: when a rank counts as lost.
    """

    model: str
    device: str = "auto"
    dtype: DtypeName = "auto"
    executor: ExecutorKind = "multiproc"
    mode: Mode = "request_batch"
    max_batch: int = 8
    max_cost: int | None = None
    admission_wait_s: float = 0.02
    admission_quiet_s: float = 0.005
    reservation_hold_s: float = 2.0
    age_bound_s: float = 30.0
    ageing_s: float = 300.0
    pass_limit: int = 16
    decode_rows: int = 8
    warmup: tuple[WarmUp, ...] = (WarmUp(),)
    warmup_limit_s: float = 600.0
    pixels: Pixels = "uint8"
    threads: int | None = None
    prompt_cache_mb: int = 256
    worker_extension: str | None = None
    attention: Mapping[str, Choice | str] = field(default_factory=dict)
    vae_slicing: bool = False
    vae_tiling: bool = False
    compile: bool = False
    cuda_graphs: bool = False
    calibration_file: str = "saggar-data/attention.json"
    ulysses: int = 1
    ring: int = 1
    cfg: int = 1
    ranks: int = 0
    replicas: int = 1
    nodes: Nodes | None = None
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_choices()
        for name in ("ulysses", "ring", "cfg", "max_batch", "pass_limit", "decode_rows", "replicas"):
            check_count(name, getattr(self, name))
        check_count("ranks", self.ranks, 0)
        if not self.ranks:
            object.__setattr__(self, "ranks", self.degrees.size)
        for name in _TIMES:
            check_number(name, getattr(self, name))
        check_count("prompt_cache_mb", self.prompt_cache_mb, 0)
        for name in ("max_cost", "threads"):
            check_count(name, getattr(self, name), or_none=True)
        check_number("ageing_s", self.ageing_s, above=True)
        checked(self.attention)
        self.degrees.check_ranks(self.ranks)
        if self.ranks > 1 and self.executor == "local":
            raise refuse(f"the local executor has one rank, not {self.ranks}")
        self._check_nodes()

    @property
    def kernels(self) -> Mapping[str, Choice]:
        """`attention` with all choices in full."""
        return checked(self.attention)

    @property
    def degrees(self) -> Degrees:
        """The ranks of one group by axis."""
        return Degrees(ulysses=self.ulysses, ring=self.ring, cfg=self.cfg)

    @property
    def ranks_per_node(self) -> int:
        """How many ranks of a group one machine has."""
        return self.ranks // (self.nodes.count if self.nodes else 1)

    def _check_kinds(self) -> None:
        """Of what is neither a choice nor a number."""
        for name, kind, said in _KINDS:
            check_kind(name, getattr(self, name), kind, said)
        for name, kind, said in _KINDS_OR_NONE:
            if getattr(self, name) is not None:
                check_kind(name, getattr(self, name), kind, f"{said} or None")
        for one in self.warmup:
            check_kind("warmup", one, WarmUp, "a tuple of WarmUp")

    def _check_nodes(self) -> None:
        if self.nodes is None:
            return
        if self.ranks % self.nodes.count:
            raise Unsupported(f"{self.ranks} ranks cannot be shared evenly by {self.nodes.count} nodes")
        if self.executor == "local" or self.replicas > 1:
            raise Unsupported("several nodes need the multiproc executor and hold one replica")

    def _check_choices(self) -> None:
        choices = {"executor": ExecutorKind, "mode": Mode, "dtype": DtypeName, "pixels": Pixels}
        for name, choice in choices.items():
            allowed = get_args(choice)
            if getattr(self, name) not in allowed:
                raise Unsupported(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        kind, _, index = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (index and not index.isdigit()):
            raise Unsupported(f"device must be auto, cpu, cuda or cuda:N, not {self.device!r}")
