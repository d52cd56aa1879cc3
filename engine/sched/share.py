"""What one replica has a share in: what waits for any of them, what was parked on it, and what it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from saggar.engine.sched.backlog import Backlog
from saggar.engine.sched.base import Entry


class Share:
    """`common` is the backlog of all. `parked` is this replica's own, since latents do not travel; a single replica
    needs no second one.
    """

    def __init__(self, common: Backlog, parked: Backlog) -> None:
        self.parked = parked
        self.running: list[Entry] = []
        self.batch = ""
        self._pools = (common,) if parked is common else (parked, common)

    @property
    def rows(self) -> int:
        """Rows that run."""
        return sum(entry.rows for entry in self.running)

    @property
    def key(self) -> str | None:
        """The batch key of what runs."""
        return self.running[0].key if self.running else None

    def oldest(self, priority: int) -> Entry | None:
        """The oldest entry of a class, over all keys."""
        return _elder(pool.oldest(priority) for pool in self._pools)

    def oldest_filler(self, priority: int) -> Entry | None:
        """The oldest entry of a class among the keys that can fill a batch."""
        return _elder(pool.oldest_filler(priority) for pool in self._pools)

    def rows_of(self, key: str) -> int:
        """Waiting rows of a key."""
        return sum(pool.rows_of(key) for pool in self._pools)

    def heads(self, key: str) -> list[Entry]:
        """The oldest entry of each class that the key has."""
        return [head for pool in self._pools for head in pool.heads(key)]

    def last_arrival(self, key: str) -> float:
        """When the key's newest entry came."""
        return max(pool.last_arrival(key) for pool in self._pools if pool.rows_of(key))

    def take(self, key: str, accept: Callable[[Entry], bool], window: int) -> list[Entry]:
        """Entries of a key that `accept` says yes to, by class and age; at most `window` are asked."""
        found = [entry for pool in self._pools for entry in pool.first(key, window)]
        if len(self._pools) > 1:
            found.sort(key=lambda entry: (entry.priority, entry.seq))
        taken = [entry for entry in found[:window] if accept(entry)]
        for entry in taken:
            self.discard(entry)
        return taken

    def discard(self, entry: Entry) -> bool:
        """Take a waiting or parked entry out; False if it is not here."""
        return any(pool.discard(entry) for pool in self._pools)


def _elder(entries: Iterable[Entry | None]) -> Entry | None:
    return min((entry for entry in entries if entry is not None), key=lambda entry: entry.seq, default=None)
