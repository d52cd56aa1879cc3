"""What lies beside every output: all that is needed to make it again or to check it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType

from pydantic import JsonValue
from pydantic_core import to_json
from saggar.engine.request import TextCut
from saggar.workers.encode import Encoded, Parameters

SIDECAR_VERSION = 1


def sidecar(
    *,
    job_id: str,
    attempt: int,
    index: int,
    seed: int,
    request: Parameters,
    model: str,
    revision: str,
    versions: Mapping[str, str],
    numerics: str,
    batch_id: str,
    batch_size: int,
    steps: int,
    timings: Mapping[str, float],
    encoded: Encoded,
    unread: Mapping[str, TextCut] = MappingProxyType({}),
    created: datetime | None = None,
) -> dict[str, JsonValue]:
    """Everything needed to make output `index` again or to check it, as one JSON object.

    `request` is the whole request; `timings` in seconds; `created` is now if not given; `unread`, by field the texts
    that were too long, stands there if there is any.
    """
    return {
        "version": SIDECAR_VERSION,
        "job_id": job_id,
        "attempt": attempt,
        "index": index,
        "seed": seed,
        "request": dict(request),
        "model": {"name": model, "revision": revision},
        "numerics": numerics,
        "versions": dict(versions),
        "batch": {"id": batch_id, "size": batch_size},
        "steps": steps,
        "timings": dict(timings),
        **(
            {"unread": [{"field": field, **cut._asdict()} for field, cut in unread.items()]} if unread else {}
        ),
        "created": (created or datetime.now(UTC)).isoformat(),
        "file": {
            "content_type": encoded.content_type,
            "sha256": encoded.sha256,
            "bytes": len(encoded.data),
            **encoded.facts.known(),
        },
    }


def sidecar_bytes(content: Mapping[str, JsonValue]) -> bytes:
    """UTF-8 JSON for people: indented, in the order given. (json.dumps indents in Python, ten times as slowly.)"""
    return to_json(content, indent=2) + b"\n"
