"""What both trainings share: a learning rate that follows the clock, and a log."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Clock:
    """Training that is given seconds, not steps: the same command suits a laptop and a GPU."""

    seconds: float
    peak: float
    warmup_steps: int = 300
    floor: float = 0.03
    step: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def ticks(self) -> Iterator[int]:
        """Step numbers until the time is over; the clock starts here."""
        self.started = time.monotonic()
        while self.elapsed < self.seconds:
            yield self.step
            self.step += 1

    @property
    def rate(self) -> float:
        """Linear warm-up by steps, then a cosine by time down to ``floor`` of the peak."""
        progress = min(1.0, self.elapsed / self.seconds)
        cosine = self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak * cosine * min(1.0, (self.step + 1) / self.warmup_steps)


@dataclass
class Log:
    """Rows of numbers, printed and kept for the model card."""

    name: str
    rows: list[dict[str, float]] = field(default_factory=list)

    def add(self, **values: float) -> None:
        """Adds a row and prints it."""
        self.rows.append({key: round(float(value), 5) for key, value in values.items()})
        print(self.name, json.dumps(self.rows[-1]), flush=True)

    def save(self, folder: Path) -> None:
        """Writes ``<name>-log.json``."""
        (folder / f"{self.name}-log.json").write_text(json.dumps(self.rows))
