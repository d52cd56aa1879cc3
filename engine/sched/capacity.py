"""How much one forward may hold: rows, and beside it cost (rows × branches × tokens)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from saggar.engine.sched.base import Entry


@dataclass(frozen=True)
class Capacity:
    """`max_rows` 1 is serial. An entry above a limit by itself runs alone."""

    max_rows: int
    max_cost: int | None = None

    def load(self, entries: Iterable[Entry]) -> Load:
        """The load that these entries are."""
        load = Load(self)
        for entry in entries:
            load.add(entry)
        return load


@dataclass
class Load:
    """What a batch holds so far: rows, rows × branches, and the tokens of the longest row, which the forward is
    padded to.
    """

    capacity: Capacity
    rows: int = 0
    sequences: int = 0
    longest: int = 0
    alone: bool = False

    def add(self, entry: Entry) -> None:
        """Count the entry in."""
        self.rows += entry.rows
        self.sequences += entry.cost // entry.tokens
        self.longest = max(self.longest, entry.tokens)
        self.alone = self.alone or entry.suspect

    def refusal(self, entry: Entry) -> str | None:
        """Why the entry may not join (`alone`, `rows`, `cost`), None if it may. An empty batch takes anything."""
        if self.rows == 0:
            return None
        if self.alone or entry.suspect:
            return "alone"
        if self.rows + entry.rows > self.capacity.max_rows:
            return "rows"
        limit = self.capacity.max_cost
        cost = (self.sequences + entry.cost // entry.tokens) * max(self.longest, entry.tokens)
        return "cost" if limit is not None and cost > limit else None

    @property
    def full(self) -> bool:
        """Nothing may join."""
        return self.alone or self.rows >= self.capacity.max_rows
