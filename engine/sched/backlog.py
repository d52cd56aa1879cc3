"""Waiting entries by batch key, class and age; each operation costs O(log n), whatever the number of keys.

For each class there are two heaps of (seq, key): all keys with an entry of that class, and those keys
that can fill a batch. They are repaired when read: an item whose key moved on is replaced by the key's
present head or dropped. The invariant is that a key with entries of a class stands in that class's heap
with a seq not above its head's.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from saggar.engine.sched.base import Entry

CLASSES = 3
_Heap = list[tuple[int, str]]
_Item = tuple[int, int, Entry]
"""(seq, ticket, entry): a parked entry comes back under its old seq with a new ticket."""


@dataclass
class _Lane:
    """Entries of one key: a heap for each class. Items whose ticket is no longer valid are
    dropped when met.
    """

    heaps: list[list[_Item]] = field(default_factory=lambda: [[] for _ in range(CLASSES)])
    rows: int = 0
    last_arrival: float = 0.0


class Backlog:
    """`fill` is the number of rows that makes a key able to fill a batch."""

    def __init__(self, fill: int) -> None:
        self._fill = fill
        self._lanes: dict[str, _Lane] = {}
        self._tickets: dict[int, int] = {}
        self._next_ticket = itertools.count()
        self._order: list[_Heap] = [[] for _ in range(CLASSES)]
        self._fillers: list[_Heap] = [[] for _ in range(CLASSES)]
        self.rows = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Entry]:
        for lane in self._lanes.values():
            for heap in lane.heaps:
                yield from (item[2] for item in heap if self._valid(item))

    def add(self, entry: Entry) -> None:
        """Put in an entry; one that was parked returns to its old place, since `seq` decides."""
        lane = self._lanes.setdefault(entry.key, _Lane())
        head = self._head(lane, entry.priority)
        ticket = self._tickets[entry.seq] = next(self._next_ticket)
        heapq.heappush(lane.heaps[entry.priority], (entry.seq, ticket, entry))
        was_filling = lane.rows >= self._fill
        lane.rows += entry.rows
        self.rows += entry.rows
        lane.last_arrival = max(lane.last_arrival, entry.arrived)
        if head is None or entry.seq < head.seq:
            heapq.heappush(self._order[entry.priority], (entry.seq, entry.key))
            if was_filling:
                heapq.heappush(self._fillers[entry.priority], (entry.seq, entry.key))
        if not was_filling and lane.rows >= self._fill:
            self._announce_filler(entry.key, lane)

    def discard(self, entry: Entry) -> bool:
        """Take an entry out wherever it stands; False if it is not here."""
        if self._tickets.pop(entry.seq, None) is None:
            return False
        lane = self._lanes[entry.key]
        lane.rows -= entry.rows
        self.rows -= entry.rows
        if lane.rows == 0:
            del self._lanes[entry.key]
        return True

    def oldest(self, priority: int) -> Entry | None:
        """The oldest entry of a class, over all keys."""
        return self._top(self._order[priority], priority, 0)

    def oldest_filler(self, priority: int) -> Entry | None:
        """The oldest entry of a class among the keys that can fill a batch."""
        return self._top(self._fillers[priority], priority, self._fill)

    def rows_of(self, key: str) -> int:
        """Waiting rows of a key."""
        lane = self._lanes.get(key)
        return lane.rows if lane else 0

    def heads(self, key: str) -> list[Entry]:
        """The oldest entry of each class that the key has, the highest class first."""
        lane = self._lanes.get(key)
        heads = [self._head(lane, priority) for priority in range(CLASSES)] if lane else []
        return [head for head in heads if head is not None]

    def last_arrival(self, key: str) -> float:
        """When the key's newest entry came."""
        return self._lanes[key].last_arrival

    def first(self, key: str, window: int) -> list[Entry]:
        """The first entries of a key in order of class and age; they stay where they are."""
        lane = self._lanes.get(key)
        found: list[Entry] = []
        for priority in range(CLASSES if lane else 0):
            assert lane is not None
            popped: list[_Item] = []
            while len(found) < window and self._head(lane, priority) is not None:
                popped.append(heapq.heappop(lane.heaps[priority]))
                found.append(popped[-1][2])
            for item in popped:
                heapq.heappush(lane.heaps[priority], item)
        return found

    def _head(self, lane: _Lane, priority: int) -> Entry | None:
        heap = lane.heaps[priority]
        while heap and not self._valid(heap[0]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _valid(self, item: _Item) -> bool:
        return self._tickets.get(item[0]) == item[1]

    def _top(self, heap: _Heap, priority: int, fill: int) -> Entry | None:
        while heap:
            seq, key = heap[0]
            lane = self._lanes.get(key)
            head = self._head(lane, priority) if lane and lane.rows >= fill else None
            if head is None:
                heapq.heappop(heap)
            elif head.seq != seq:
                heapq.heapreplace(heap, (head.seq, key))
            else:
                return head
        return None

    def _announce_filler(self, key: str, lane: _Lane) -> None:
        for priority in range(CLASSES):
            head = self._head(lane, priority)
            if head is not None:
                heapq.heappush(self._fillers[priority], (head.seq, key))
