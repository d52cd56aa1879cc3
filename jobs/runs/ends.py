"""What ended in a run, as its controller reads it: many at a time, without a look at each job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from saggar.jobs.record import TERMINAL

if TYPE_CHECKING:
    import redis
    from saggar.jobs.settings import JobSettings

PAGE = 1_000


@dataclass(frozen=True, slots=True)
class News:
    """Jobs that had an end, in order. `gap`: some events are gone, and only the records say what they said."""

    ids: list[str]
    gap: bool


class Ends:
    """Reads a run's events from now on. What ended before, the records say."""

    def __init__(self, client: redis.Redis, settings: JobSettings, run: str) -> None:
        self._client = client
        self._key = f"{settings.key_prefix}events:run:{run}"
        last = cast("list[tuple[str, dict[str, str]]]", client.xrevrange(self._key, count=1))
        self._cursor = last[0][0] if last else "0-0"
        self._number = int(last[0][1]["number"]) if last else None

    def read(self, wait_s: float) -> News:
        """What came; waits for it for at most so long when nothing has."""
        block = max(1, round(wait_s * 1000)) if wait_s > 0 else None
        found = self._client.xread({self._key: self._cursor}, PAGE, block)
        streams = cast("list[tuple[str, list[tuple[str, dict[str, str]]]]]", found)
        ids, gap = [], False
        for cursor, fields in streams[0][1] if streams else []:
            self._cursor = cursor
            number = int(fields["number"])
            gap = gap or (self._number is not None and number != self._number + 1)
            self._number = number
            if fields["type"] in TERMINAL:
                ids.append(fields["job"])
        return News(ids, gap)
