"""A transformer's step over several ranks, random weights: ours by Ulysses, Ring and CFG, beside plain diffusers on one
rank and diffusers' own context parallel, in the same run.

python -m benchmarks.parallel [--model flux wan] [--ranks 2] [--device cpu|cuda] [--compile] [--graphs]

On a CPU the models are tiny and speak over gloo; on GPUs they have their full size, in bfloat16, over NCCL.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from saggar.engine import EngineConfig
from saggar.engine.choices import Choice
from saggar.engine.degrees import Degrees
from saggar.engine.parallel.attach import Attachment
from saggar.engine.parallel.cfg import OverRanks
from saggar.engine.parallel.mesh import Mesh
from saggar.engine.parallel.plans import SequencePlan
from saggar.engine.platform.select import place

from benchmarks.attention import settle
from benchmarks.report import table

Make = Callable[[bool], tuple[torch.nn.Module, dict[str, torch.Tensor]]]
THEIR_KERNELS = {"torch_sdpa": "native", "cudnn": "_native_cudnn", "sage": "sage", "xformers": "xformers"}
"""What diffusers calls our kernels."""


@dataclass(frozen=True)
class Way:
    """One line of the table. `ours`: by our plans, else by diffusers' own. `graphs`: recorded as CUDA graphs.
    `overlap`: the compiler may let what is sent travel while the block computes.
    """

    name: str
    degrees: Degrees
    ours: bool
    graphs: bool = False
    overlap: bool = False


@dataclass(frozen=True)
class Job:
    """What a world measures."""

    model: str
    ways: tuple[Way, ...]
    device: str
    compiled: bool
    kernel: str
    repeats: int
    ranks: int
    profile: bool


def flux(full: bool) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """FLUX.1 at 1024², or a tiny one."""
    from diffusers import FluxTransformer2DModel

    tiny: dict[str, Any] = {
        "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4,
        "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8),
    }  # fmt: skip
    model = FluxTransformer2DModel(guidance_embeds=True, **({} if full else tiny))
    side, text = (64, 512) if full else (32, 64)
    ids = torch.stack(
        [
            torch.zeros(side * side),
            *(x.flatten() for x in torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")),
        ],
        1,
    )
    config = model.config
    return model, {
        "hidden_states": torch.randn(1, side * side, config.in_channels),
        "encoder_hidden_states": torch.randn(1, text, config.joint_attention_dim),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": ids,
        "txt_ids": torch.zeros(text, 3),
    }


def wan(full: bool) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Wan 2.1's 1.3B at 480p and 81 frames, or a tiny one."""
    from diffusers import WanTransformer3DModel

    size: dict[str, Any] = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
    tiny: dict[str, Any] = {
        "num_attention_heads": 4, "attention_head_dim": 12, "ffn_dim": 64, "num_layers": 2, "text_dim": 32,
    }  # fmt: skip
    model = WanTransformer3DModel(**(size if full else tiny))
    shape, text = ((21, 60, 104), 512) if full else ((5, 16, 16), 32)
    return model, {
        "hidden_states": torch.randn(1, 16, *shape),
        "encoder_hidden_states": torch.randn(1, text, model.config.text_dim),
        "timestep": torch.tensor([500]),
    }


MODELS: Mapping[str, tuple[Make, SequencePlan]] = {
    "flux": (
        flux,
        SequencePlan(
            {
                "transformer_blocks.*.attn": ("text", "image"),
                "single_transformer_blocks.*.attn": ("text", "image"),
            },
            theirs=True,
        ),
    ),
    "wan": (wan, SequencePlan({"blocks.*.attn1": ("image",), "blocks.*.attn2": ()}, theirs=True)),
}


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--graphs", action="store_true", help="ours as CUDA graphs too")
    parser.add_argument(
        "--kernel", default="torch_sdpa", help="of both, where diffusers has it under a name of its own"
    )
    parser.add_argument(
        "--only", nargs="+", help="lines that have one of these in their names, and the first"
    )
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="show where the device's time goes, by kernel")
    options = parser.parse_args()
    ranks = options.ranks
    for model in options.model:
        job = Job(
            model,
            _only(ways(ranks, options.compile, options.graphs), options.only),
            options.device,
            options.compile,
            options.kernel,
            options.repeats,
            ranks,
            options.profile,
        )
        found = world(job)
        one = next((value for value in found if isinstance(value, float)), None)
        lines: list[tuple[object, ...]] = []
        for way, value in zip(job.ways, found, strict=True):
            if isinstance(value, str) or one is None:
                lines.append((way.name, value, ""))
                continue
            # One rank makes the branches of guidance one after the other.
            lines.append((way.name, f"{value * 1000:.1f}", f"{one * way.degrees.cfg / value:.2f}"))
        title = f"{model}: one step, {'compiled blocks' if options.compile else 'eager'}, {options.kernel}"
        print(table(title, ("how", "ms", "ratio to plain on one rank"), lines), flush=True)


def ways(ranks: int, compiled: bool, graphs: bool) -> tuple[Way, ...]:
    """The table's lines; with `graphs` ours again as CUDA graphs."""
    ulysses, ring, cfg = Degrees(ulysses=ranks), Degrees(ring=ranks), Degrees(cfg=ranks)
    plain = [
        Way("plain diffusers, 1 rank", Degrees(), False),
        Way("ours, 1 rank", Degrees(), True),
        Way(f"diffusers, Ulysses {ranks}", ulysses, False),
        Way(f"ours, Ulysses {ranks}", ulysses, True),
        Way(f"diffusers, Ring {ranks}", ring, False),
        Way(f"ours, Ring {ranks}", ring, True),
        Way(f"ours, CFG {ranks}: {ranks} branches", cfg, True),
    ]
    if graphs:
        plain += [
            Way("ours, 1 rank, CUDA graphs", Degrees(), True, True),
            Way(f"ours, Ulysses {ranks}, CUDA graphs", ulysses, True, True),
            Way(f"ours, Ring {ranks}, CUDA graphs", ring, True, True),
        ]
    if compiled:
        name = f"ours, Ulysses {ranks}, {'CUDA graphs, ' if graphs else ''}reordered by the compiler"
        plain.append(Way(name, ulysses, True, graphs, True))
    return tuple(plain)


def _only(every: tuple[Way, ...], words: Sequence[str] | None) -> tuple[Way, ...]:
    return tuple(
        way for i, way in enumerate(every) if not i or words is None or any(w in way.name for w in words)
    )


def world(job: Job) -> list[float | str]:
    """Median seconds of a step in the slowest rank for each way, or why it fails."""
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (job, str(Path(folder) / "store"), results), nprocs=job.ranks)  # type: ignore[no-untyped-call]
    told: list[list[float | str]] = [results.get() for _ in range(job.ranks)]
    return [_slowest(values) for values in zip(*told, strict=True)]


def _slowest(values: Sequence[float | str]) -> float | str:
    wrong = [value for value in values if isinstance(value, str)]
    return wrong[0] if wrong else max(value for value in values if isinstance(value, float))


def rank(number: int, job: Job, store: str, results: Any) -> None:
    """One process of the world: each way in turn, with a new model of the same weights."""
    placement, platform = place(EngineConfig(model="any", device=job.device, threads=1), slot=number)
    device = placement.device
    assert device is not None and placement.dtype is not None
    dist.init_process_group(
        platform.communication, init_method=f"file://{store}", rank=number, world_size=job.ranks
    )
    told: list[float | str] = []
    for way in job.ways:
        torch.compiler.reset()
        try:
            told.append(measured(job, way, number, device, placement.dtype))
        except Exception as error:  # noqa: BLE001  (the table says so, in all ranks alike)
            told.append(f"fails: {str(error).strip().splitlines()[0][:90]}")
        if number == 0:
            print(f"{way.name}: {told[-1]}", flush=True)
        platform.free_cache()
    results.put(told)
    dist.barrier()
    dist.destroy_process_group()


def measured(job: Job, way: Way, number: int, device: torch.device, dtype: torch.dtype) -> float:
    """Median seconds of a step in this rank."""
    own = number if way.degrees.size == job.ranks else 0
    mesh = Mesh.of(way.degrees, own, lambda ranks: dist.new_group(list(ranks)))
    make, plan = MODELS[job.model]
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with device:  # weights of this size are drawn on the device, or it takes minutes
        model, given = make(device.type == "cuda")
    torch.set_default_dtype(torch.float32)
    model = model.eval()
    given = {name: x.float() if "ids" in name else x for name, x in given.items()}
    if way.ours:
        Attachment({"default": Choice(job.kernel)}, (), mesh, plan, {}).put_on(model)
    else:
        _theirs(model, way.degrees, THEIR_KERNELS[job.kernel])
    torch._inductor.config.reorder_for_compute_comm_overlap = way.overlap
    if job.compiled:
        model.compile_repeated_blocks()  # type: ignore[operator]
    platform = place(EngineConfig(model="any", device=job.device), slot=number)[1]
    if way.graphs:
        platform.record(model)
    spread = OverRanks(mesh.cfg, device) if mesh.cfg.size > 1 else None

    def step() -> None:
        out = model(**given, return_dict=False)[0]
        if spread is not None:
            spread.gather(out, mesh.cfg.size, lambda parts: torch.cat(list(parts)), "one shape")

    with torch.inference_mode():
        took = _timed(step, device, job.repeats)
        if job.profile:
            shown = _profiled(step, device)
            if number == 0:
                print(f"{way.name}\n{shown}", flush=True)
    platform.forget()
    return took


def _theirs(model: Any, degrees: Degrees, kernel: str) -> None:
    from diffusers import ContextParallelConfig

    if degrees.size > 1:
        shared = ContextParallelConfig(ulysses_degree=degrees.ulysses, ring_degree=degrees.ring)
        model.enable_parallelism(config=shared)
    model.set_attention_backend(kernel)


def _profiled(step: Callable[[], None], device: torch.device) -> str:
    """Milliseconds of one step by the device's kernels, the largest first; those that run at once are counted each."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CPU if device.type == "cpu" else ProfilerActivity.CUDA
    with profile(activities=[activity]) as seen:
        step()
        settle(device)
    on_device = device.type != "cpu"
    took = {
        event.key: event.self_device_time_total if on_device else event.self_cpu_time_total
        for event in seen.key_averages()
    }
    largest = sorted(took, key=lambda key: -took[key])[:12]
    return "\n".join(f"{took[key] / 1000:9.2f} ms  {key[:100]}" for key in largest)


def _timed(step: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Median seconds, after three steps that do not count; all ranks begin together."""
    seconds = []
    for _ in range(repeats + 3):
        dist.barrier()
        settle(device)
        start = time.perf_counter()
        step()
        settle(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[3:])


if __name__ == "__main__":
    main()
