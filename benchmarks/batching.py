"""`saggar/emoji` at 1 to 16 rows against a loop of plain diffusers calls, in the same run.

OMP_WAIT_POLICY=PASSIVE python -m benchmarks.batching [--rows 1 4 8 16] [--steps 8]
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from saggar.engine import Engine, EngineConfig, Request
from saggar.engine.models.registry import resolve

from benchmarks.report import table

MODEL = "saggar/emoji"
REPEATS = 3
PROMPTS = (
    "a red apple",
    "dog face",
    "rocket",
    "a glossy cat on a blue background",
    "pizza",
    "fire",
    "guitar",
    "owl",
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    params = {"height": 64, "width": 64, "max_sequence_length": 32, "true_cfg_scale": 3.0,
              "num_inference_steps": options.steps}  # fmt: skip
    plain = plain_seconds(params)
    lines = [("plain diffusers, one by one", f"{plain * 1000:.0f}", "1.00")]
    with Engine.make(EngineConfig(model=MODEL, executor="local", max_batch=max(options.rows))) as engine:
        for rows in options.rows:
            requests = [
                Request(f"r{row}", PROMPTS[row % len(PROMPTS)], negative_prompt="", seed=row, params=params)
                for row in range(rows)
            ]
            timed(engine, requests)
            each = median(timed(engine, requests) for _ in range(REPEATS)) / rows
            lines.append((f"engine, {rows} rows", f"{each * 1000:.0f}", f"{plain / each:.2f}"))
    title = f"{MODEL}, 64×64, {options.steps} steps with CFG: batches against plain diffusers"
    print(table(title, ("what", "ms a picture", "ratio to plain"), lines))


def timed(engine: Engine, requests: list[Request]) -> float:
    """Seconds of one batch."""
    start = time.perf_counter()
    engine.generate(requests)
    return time.perf_counter() - start


def plain_seconds(params: dict[str, float]) -> float:
    """Seconds a picture of the plain pipeline, the median after one that warms up."""
    import torch
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(str(resolve(MODEL)))
    pipeline.set_progress_bar_config(disable=True)
    times = []
    for seed, prompt in enumerate(PROMPTS[: REPEATS + 1]):
        start = time.perf_counter()
        generator = torch.Generator("cpu").manual_seed(seed)
        pipeline(prompt, negative_prompt="", generator=generator, **params)
        times.append(time.perf_counter() - start)
    return median(times[1:])


if __name__ == "__main__":
    main()
