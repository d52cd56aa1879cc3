"""What the engine itself costs: the no-op family, by executor, mode and rows; and scheduling by how much waits.

    python -m benchmarks.engine_overhead [--steps 400]

Goal: at most 300 µs a step and 30 µs a row.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from saggar.engine import Engine, EngineConfig, Request
from saggar.engine.models.tiny import make_tiny
from saggar.engine.sched.base import Entry, Status
from saggar.engine.sched.capacity import Capacity
from saggar.engine.sched.policy import KeyedScheduler, Rules

from benchmarks.report import table

ROWS = (1, 4, 16)
REPEATS = 3


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_tiny("noop", Path(folder)))
        lines = [
            line(model, executor, mode, steps)
            for executor in ("local", "multiproc")
            for mode in ("request_batch", "step_batch")
        ]
    header = (
        "executor",
        "mode",
        *(f"{rows} rows, µs a step" for rows in ROWS),
        "µs a row",
        "µs a step",
        "goal",
    )
    print(table("Engine overhead, no-op family", header, lines))
    drawn = ((100, 5), (1_000, 50), (10_000, 50), (10_000, 500))
    decisions = [(f"{waiting:,}", keys, f"{decision(waiting, keys):.0f}") for waiting, keys in drawn]
    print(table("Scheduling", ("waiting", "keys", "µs a batch of eight"), decisions))


def line(model: str, executor: str, mode: str, steps: int) -> tuple[str, ...]:
    """One row of the first table."""
    times = [one(model, executor, mode, rows, steps) for rows in ROWS]
    a_row = (times[-1] - times[0]) / (ROWS[-1] - ROWS[0])
    a_step = times[0] - a_row
    verdict = "met" if a_row <= 30 and a_step <= 300 else "missed"
    return (executor, mode, *(f"{value:.0f}" for value in times), f"{a_row:.1f}", f"{a_step:.0f}", verdict)


def one(model: str, executor: str, mode: str, rows: int, steps: int) -> float:
    """Microseconds a step, the median of a few runs after one that warms up."""
    config = EngineConfig(model=model, executor=executor, mode=mode, max_batch=ROWS[-1])  # type: ignore[arg-type]
    requests = [Request(f"r{row}", "x", seed=row, params={"steps": steps}) for row in range(rows)]
    with Engine.make(config) as engine:
        timed(lambda: engine.generate(requests))
        middle = median(timed(lambda: engine.generate(requests)) for _ in range(REPEATS))
    return middle / steps * 1e6


def timed(action: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def decision(waiting: int, keys: int) -> float:
    """Microseconds to begin one batch of eight and to end its rows."""
    scheduler = KeyedScheduler(Rules(Capacity(8)))
    for index in range(waiting):
        scheduler.add(Entry(Request(f"r{index}", "x"), f"k{index % keys}", index, 0.0))
    batches = min(50, waiting // 16)
    start = time.perf_counter()
    for _ in range(batches):
        for entry in scheduler.schedule(1.0).run:
            scheduler.leave(entry, Status.COMPLETED)
    return (time.perf_counter() - start) / batches * 1e6


if __name__ == "__main__":
    main()
