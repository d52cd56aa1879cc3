"""What both trainings share: a learning rate that follows the clock, averaged weights, and a log."""

import copy
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn


@dataclass
class Clock:
    """Training that is given seconds, not steps: the same command suits a laptop and a GPU."""

    seconds: float
    peak: float
    warmup_steps: int = 200
    floor: float = 0.03
    step: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def ticks(self, grace_steps: int = 4) -> Iterator[int]:
        """Step numbers until the time is over; the clock starts after the first steps, which compile."""
        while self.step < grace_steps or self.elapsed < self.seconds:
            yield self.step
            self.step += 1
            if self.step == grace_steps:
                self._restart()

    def _restart(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.started = time.monotonic()

    @property
    def rate(self) -> float:
        """Linear warm-up by steps, then a cosine by time down to ``floor`` of the peak."""
        progress = min(1.0, self.elapsed / self.seconds)
        cosine = self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak * cosine * min(1.0, (self.step + 1) / self.warmup_steps)


class Average:
    """An exponential moving average of a module's weights, short-sighted at first."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.live: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        self.kept = [p.detach().clone() for p in self.live]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Moves the average towards the live weights."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.kept, self.live, 1 - decay)

    @torch.no_grad()
    def into(self, module: nn.Module) -> None:
        """Copies the average into a module of the same shape."""
        for target, kept in zip([p for p in module.parameters() if p.requires_grad], self.kept, strict=True):
            target.copy_(kept)


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
        (folder / f"{self.name}-log.json").write_text(json.dumps(copy.copy(self.rows)))


def optimiser(module: nn.Module, fused: bool) -> torch.optim.AdamW:
    """AdamW with the betas that suit short trainings, and no decay: this model is meant to remember."""
    chosen = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(chosen, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0, fused=fused)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
