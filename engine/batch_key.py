"""The canonical text that rows of one batch share; producers compute the same from the model's card."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from saggar.engine.request import ParamValue

_SIZES = "\n"  # canonical JSON has none


def with_sizes(key: str, sizes: str) -> str:
    """A key that also says what only the inputs themselves can."""
    return f"{key}{_SIZES}{sizes}" if sizes else key


def announced_key(key: str) -> str:
    """The part of a key that was known before the inputs were: by it requests are announced."""
    return key.partition(_SIZES)[0]


def canonical_key(task: str, params: Mapping[str, ParamValue], batch_fields: Iterable[str]) -> str:
    """`params` must be complete. KeyError: a batch field that is missing."""
    shared: dict[str, ParamValue] = {"task": task, **{name: params[name] for name in batch_fields}}
    return json.dumps(shared, sort_keys=True, separators=(",", ":"))
