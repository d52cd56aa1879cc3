"""The canonical text that rows of one batch share; producers compute the same from the model's card."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from saggar.engine.request import ParamValue


def canonical_key(task: str, params: Mapping[str, ParamValue], batch_fields: Iterable[str]) -> str:
    """`params` must be complete. KeyError: a batch field that is missing."""
    shared: dict[str, ParamValue] = {"task": task, **{name: params[name] for name in batch_fields}}
    return json.dumps(shared, sort_keys=True, separators=(",", ":"))
