"""How much a worker wants from its lane: asked before every fetch, told about every message.

The lane is emptied only as fast as there is room in the engine; the rest of the backlog stays where every
worker and every later choice can see it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Want:
    """What to fetch next.

    `rows`: rows of a new batch that the engine takes now; none is begun when it is 0 or less.
    `open_key`, `room`: a batch that still has room for so many rows of this key, if there is one. The lane tops it up
    first, whatever its age, so the engine must close a batch sometime, or other keys starve.
    `urgent`: rows taken of interactive messages although `rows` is spent.
    """

    rows: int
    open_key: str | None = None
    room: int = 0
    urgent: int = 0


class Appetite(Protocol):
    """Answers from the consuming thread: must be quick, must not block."""

    def want(self, lane: str, free: int) -> Want:
        """`free`: messages that the prefetch limit still allows."""
        ...

    def fetched(self, lane: str, key: str, priority_class: int, rows: Mapping[str, int]) -> None:
        """These messages, one batch key, are now leased and on their way to the task: the rows of each by its tag."""
        ...

    def gone(self, tag: str) -> None:
        """The message was acknowledged, rejected, given back or lost. Called from any thread."""
        ...


class PrefetchAppetite:
    """What the prefetch limit allows, no open batch: a plain worker without an engine."""

    def want(self, lane: str, free: int) -> Want:
        return Want(rows=free, urgent=free)

    def fetched(self, lane: str, key: str, priority_class: int, rows: Mapping[str, int]) -> None:
        pass

    def gone(self, tag: str) -> None:
        pass


class LateAppetite:
    """An appetite filled in later: an application is configured before its engine exists. Until then none.

    Celery's remote control sends the transport's options as JSON, hence `__json__` (kombu's encoder asks
    for it).
    """

    def __init__(self) -> None:
        self._appetite: Appetite | None = None

    def fill(self, appetite: Appetite) -> None:
        self._appetite = appetite

    def want(self, lane: str, free: int) -> Want:
        return self._appetite.want(lane, free) if self._appetite else Want(rows=0)

    def fetched(self, lane: str, key: str, priority_class: int, rows: Mapping[str, int]) -> None:
        if self._appetite:
            self._appetite.fetched(lane, key, priority_class, rows)

    def gone(self, tag: str) -> None:
        if self._appetite:
            self._appetite.gone(tag)

    def __json__(self) -> str:
        return type(self._appetite).__name__
