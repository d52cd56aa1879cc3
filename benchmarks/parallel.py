"""A transformer's step over several ranks, random weights: ours by Ulysses, Ring and CFG, beside plain diffusers on one
rank and diffusers' own context parallel, in the same run.

python -m benchmarks.parallel [--model flux wan] [--ranks 2] [--device cpu|cuda] [--compile] [--repeats 8]

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
from saggar.engine.degrees import Degrees
from saggar.engine.parallel.attach import Attachment
from saggar.engine.parallel.cfg import OverRanks
from saggar.engine.parallel.mesh import Mesh
from saggar.engine.parallel.plans import SequencePlan
from saggar.engine.platform.select import place

from benchmarks.attention import settle
from benchmarks.report import table

Make = Callable[[bool], tuple[torch.nn.Module, dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class Job:
    """What one rank of a world measures. `ours`: by our plans, else by diffusers' own."""

    model: str
    degrees: Degrees
    ours: bool
    device: str
    compiled: bool
    repeats: int


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
    parser.add_argument("--repeats", type=int, default=8)
    options = parser.parse_args()
    ranks = options.ranks
    for model in options.model:
        lines: list[tuple[object, ...]] = []
        one: float | None = None
        for name, degrees, ours in (
            ("plain diffusers, 1 rank", Degrees(), False),
            ("ours, 1 rank", Degrees(), True),
            (f"diffusers, Ulysses {ranks}", Degrees(ulysses=ranks), False),
            (f"ours, Ulysses {ranks}", Degrees(ulysses=ranks), True),
            (f"diffusers, Ring {ranks}", Degrees(ring=ranks), False),
            (f"ours, Ring {ranks}", Degrees(ring=ranks), True),
            (f"ours, CFG {ranks}: {ranks} branches", Degrees(cfg=ranks), True),
        ):
            job = Job(model, degrees, ours, options.device, options.compile, options.repeats)
            found = world(job)
            if isinstance(found, str):
                lines.append((name, found, ""))
                continue
            one = one or found
            work = degrees.cfg  # one rank makes as many forwards one after the other
            lines.append((name, f"{found * 1000:.1f}", f"{one * work / found:.2f}"))
        title = f"{model}: one step, {'compiled blocks' if options.compile else 'eager'}"
        print(table(title, ("how", "ms", "ratio to plain on one rank"), lines))


def world(job: Job) -> float | str:
    """Median seconds of a step in the slowest rank, or what went wrong."""
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(  # type: ignore[no-untyped-call]
                rank, (job, str(Path(folder) / "store"), results), nprocs=job.degrees.size
            )
        except mp.ProcessRaisedException as error:
            return f"fails: {str(error).strip().splitlines()[-1][:90]}"
    told: list[float] = [results.get() for _ in range(job.degrees.size)]
    return max(told)


def rank(number: int, job: Job, store: str, results: Any) -> None:
    """One process of a world."""
    placement, platform = place(EngineConfig(model="any", device=job.device, threads=1), slot=number)
    device = placement.device
    assert device is not None and placement.dtype is not None
    size = job.degrees.size
    dist.init_process_group(
        platform.communication, init_method=f"file://{store}", rank=number, world_size=size
    )
    mesh = Mesh.of(job.degrees, number, lambda ranks: dist.new_group(list(ranks)))
    torch.manual_seed(0)
    make, plan = MODELS[job.model]
    model, given = make(platform.kind == "cuda")
    model = model.to(device, placement.dtype).eval()
    given = {
        name: x.to(device, placement.dtype if x.is_floating_point() and "ids" not in name else x.dtype)
        for name, x in given.items()
    }
    _spread(model, job, mesh, plan, platform.attention)
    if job.compiled:
        model.compile_repeated_blocks()  # type: ignore[operator]
    spread = OverRanks(mesh.cfg, device) if mesh.cfg.size > 1 else None

    def step() -> None:
        out = model(**given, return_dict=False)[0]
        if spread is not None:
            spread.gather(out, size, lambda parts: torch.cat(list(parts)), "one shape")

    with torch.inference_mode():
        results.put(_timed(step, device, job.repeats))
    dist.barrier()
    dist.destroy_process_group()


def _spread(model: Any, job: Job, mesh: Mesh, plan: SequencePlan, kernels: Sequence[str]) -> None:
    if job.ours:
        Attachment({}, kernels, mesh, plan, {}).put_on(model)
    elif job.degrees.size > 1:
        from diffusers import ContextParallelConfig

        model.enable_parallelism(
            config=ContextParallelConfig(ulysses_degree=job.degrees.ulysses, ring_degree=job.degrees.ring)
        )


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
