"""How many rows of a shape one forward may hold: the configured number, until memory teaches a smaller one."""

from __future__ import annotations

from collections.abc import Mapping


class RowLimits:
    """Limits by batch key; those that were `learned` before, or are now, stay for the life of the process."""

    def __init__(self, max_rows: int, learned: Mapping[str, int] | None = None) -> None:
        self._max_rows = max_rows
        self._learned: dict[str, int] = dict(learned or {})

    def of(self, key: str) -> int:
        """Rows of one forward of this key."""
        return self._learned.get(key, self._max_rows)

    def halve(self, key: str, rows: int) -> int:
        """A forward of `rows` rows did not fit: half of it is the limit from now on."""
        self._learned[key] = max(1, rows // 2)
        return self._learned[key]
