"""Models of their published size with random weights, from a checkpoint's folder to pictures: the engine's batches
beside plain diffusers, one by one and in batches of its own, in the same run.

python -m benchmarks.full_size [--model sdxl flux] [--size 1024] [--rows 1 4] [--steps 20] [--compile] [--graphs]

Denoiser and VAE have their full size, text encoders a tiny one: they run once a picture. Random weights draw nothing
that could be looked at, and take the time that trained ones take. Without a GPU everything is tiny, to try the program.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import diffusers
import torch
from saggar.engine import Engine, EngineConfig, Request
from saggar.engine.models.tiny import make_tiny
from saggar.engine.platform.base import Platform
from saggar.engine.platform.select import place

from benchmarks.report import table

PROMPT = "a red fox that runs over the snow, number {}"
NEGATIVE = "ugly, blurred"
BLOCKS = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "norm_num_groups": 32,
          "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A tiny model and what of it is replaced: words of its parts' configurations that make them large."""

    tiny: str
    pipeline: str
    parts: Mapping[str, Mapping[str, Any]]
    params: Mapping[str, Any]
    negative: bool


MODELS = {
    "sdxl": Model(
        "sdxl",
        "StableDiffusionXLPipeline",
        {
            "unet": {
                "sample_size": 128, "block_out_channels": (320, 640, 1280), "layers_per_block": 2,
                "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                "attention_head_dim": (5, 10, 20), "transformer_layers_per_block": (1, 2, 10),
                "norm_num_groups": 32,
            },
            "vae": {**BLOCKS, "latent_channels": 4, "scaling_factor": 0.13025},
        },
        {"guidance_scale": 5.0},
        negative=True,
    ),
    "flux": Model(
        "flux",
        "FluxPipeline",
        {
            "transformer": {
                "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
                "num_attention_heads": 24, "axes_dims_rope": (16, 56, 56),
            },
            "vae": {**BLOCKS, "latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159},
        },
        {"guidance_scale": 3.5, "max_sequence_length": 512},
        negative=False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """What is measured of one model."""

    model: Model
    folder: Path
    platform: Platform
    device: torch.device
    params: Mapping[str, Any]
    repeats: int

    def prompts(self, rows: int) -> list[str]:
        """So many, of one length."""
        return [PROMPT.format(row) for row in range(rows)]


def main() -> None:
    """Print a table for each model."""
    options = arguments()
    placement, platform = place(EngineConfig(model="any", device=options.device), slot=0)
    assert placement.device is not None
    full = placement.device.type != "cpu"
    for name in options.model:
        model = MODELS[name]
        with tempfile.TemporaryDirectory() as scratch:
            folder = built(model, Path(scratch) / "model", placement.device if full else None)
            _forget(platform)
            params = {**model.params, "num_inference_steps": options.steps}
            size = options.size if full else 64
            shape = {"height": size, "width": size}
            task = Task(model, folder, platform, placement.device, {**params, **shape}, options.repeats)
            print(measured(task, name, options), flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--size", type=int, default=1024, help="height and width in pixels")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="the engine with compiled blocks too")
    parser.add_argument("--graphs", action="store_true", help="the engine with CUDA graphs too")
    return parser.parse_args()


def built(model: Model, folder: Path, device: torch.device | None) -> Path:
    """The checkpoint's folder; parts of full size are drawn on the device, in bfloat16. None: all stays tiny."""
    make_tiny(model.tiny, folder)
    if device is None:
        return folder
    for part, words in model.parts.items():
        config = json.loads((folder / part / "config.json").read_text())
        kind = getattr(diffusers, config["_class_name"])
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with device:
                module = kind.from_config({**config, **words})
        finally:
            torch.set_default_dtype(before)
        shutil.rmtree(folder / part)
        module.save_pretrained(folder / part)
    return folder


def measured(task: Task, name: str, options: argparse.Namespace) -> str:
    """One model's table: milliseconds of a picture, and the ratio to plain diffusers one by one."""
    found = [_told(f"plain diffusers, {rows} at once", each) for rows, each in plain(task, options.rows)]
    _forget(task.platform)
    kinds: list[tuple[str, dict[str, bool]]] = [("engine", {})]
    kinds += [("engine, blocks compiled", {"compile": True})] if options.compile else []
    kinds += [("engine, CUDA graphs", {"cuda_graphs": True})] if options.graphs else []
    for label, settings in kinds:
        found += [
            _told(f"{label}, {rows} at once", each) for rows, each in ours(task, options.rows, settings)
        ]
    base = found[0][1]
    lines = [(label, f"{each * 1000:.0f}", f"{base / each:.2f}") for label, each in found]
    what = f"{name}, {task.params['height']}×{task.params['width']}, {options.steps} steps"
    card = "CPU, tiny" if task.device.type == "cpu" else task.platform.name(task.device)
    return table(f"{what}, {card}", ("what", "ms a picture", "ratio to plain"), lines)


def _told(label: str, each: float) -> tuple[str, float]:
    """A line of the table, said at once: the table comes at the end."""
    print(f"{label}: {each * 1000:.0f} ms a picture", file=sys.stderr, flush=True)
    return label, each


def plain(task: Task, rows: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Seconds of a picture by the plain pipeline, by how many it is called for."""
    dtype = task.platform.default_dtype()
    kind = getattr(diffusers, task.model.pipeline)
    pipeline = kind.from_pretrained(task.folder, dtype=dtype).to(task.device)
    pipeline.set_progress_bar_config(disable=True)

    def call(count: int) -> None:
        generators = [torch.Generator("cpu").manual_seed(row) for row in range(count)]
        given = {"negative_prompt": [NEGATIVE] * count} if task.model.negative else {}
        pipeline(task.prompts(count), generator=generators, **given, **task.params)

    for count in rows:
        yield count, seconds(partial(call, count), task.repeats) / count


def ours(task: Task, rows: Sequence[int], settings: Mapping[str, bool]) -> Iterator[tuple[int, float]]:
    """Seconds of a picture by an engine with its rank in a process of its own."""
    usual = EngineConfig(model=str(task.folder), device=str(task.device), max_batch=max(rows), warmup=())
    config = replace(usual, **settings)
    negative = NEGATIVE if task.model.negative else None

    def call(engine: Engine, count: int) -> None:
        engine.generate(
            [
                Request(f"r{row}", prompt, negative_prompt=negative, seed=row, params=task.params)
                for row, prompt in enumerate(task.prompts(count))
            ]
        )

    with Engine.make(config) as engine:
        for count in rows:
            yield count, seconds(partial(call, engine, count), task.repeats) / count


def seconds(call: Callable[[], None], repeats: int) -> float:
    """The median of a call, after one that warms up. Each ends with pixels on the host."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


def _forget(platform: Platform) -> None:
    gc.collect()
    platform.free_cache()


if __name__ == "__main__":
    main()
