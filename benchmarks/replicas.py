"""What replicas bring: requests a second of a no-op family that sleeps in each step, by number of replicas.

    python -m benchmarks.replicas [--batches 24]

Goal: 1.9 times as many with two, 2.8 times with three.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from saggar.engine import Engine, EngineConfig, Request
from saggar.engine.models.tiny import make_tiny

from benchmarks.report import table

ROWS = 8
STEPS = 10
GOALS = {1: 1.0, 2: 1.9, 3: 2.8}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=24)
    batches = parser.parse_args().batches
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_tiny("noop", Path(folder)))
        lines = []
        for mode in ("request_batch", "step_batch"):
            rates = {replicas: rate(model, mode, replicas, batches) for replicas in GOALS}
            for replicas, value in rates.items():
                ratio = value / rates[1]
                verdict = "met" if ratio >= GOALS[replicas] else "missed"
                lines.append((mode, replicas, f"{value:.0f}", f"{ratio:.2f}", GOALS[replicas], verdict))
    print(table("Replicas", ("mode", "replicas", "requests a second", "ratio", "goal", ""), lines))


def rate(model: str, mode: str, replicas: int, batches: int) -> float:
    """Requests a second; each step sleeps 20 ms, whatever its rows."""
    config = EngineConfig(model=model, mode=mode, replicas=replicas, max_batch=ROWS)  # type: ignore[arg-type]
    requests = [
        Request(f"r{index}", "x", params={"steps": STEPS, "sleep_s": 0.02}) for index in range(batches * ROWS)
    ]
    with Engine.make(config) as engine:
        engine.generate([Request("first", "x")])
        start = time.perf_counter()
        engine.generate(requests)
        return len(requests) / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
