"""What a run keeps beside its output, against what names it: the parts of its plan by their hashes, `_SUCCESS` by the
plan's digest. Reports, and what is noted for them, are only known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from pydantic import ValidationError
from saggar.storage.base import ObjectInfo, Storage
from saggar.workers.runs.findings import Finding, Part, check_bytes, read
from saggar.workers.runs.folder import RunIndex

_MEMBER = re.compile(
    r"(?P<base>(?:.*/)?_runs/[^/]+)/(?:manifest/\d{5,}(?:-[0-9a-f]{8})?\.jsonl"
    r"|(?P<note>unread/\d{8,}-[0-9a-f]{8}\.jsonl)|[^/]+)"
)
_NAMES = frozenset({"run.json", "_SUCCESS", "report.json", "report.html", "accepted.jsonl", "unread.jsonl"})


def run_of(key: str) -> str | None:
    """The folder of the run to whose own objects a key belongs, or None."""
    found = _MEMBER.fullmatch(key)
    return found["base"] if found else None


def check_run(storage: Storage, base: str, found: Sequence[ObjectInfo]) -> Part:
    """`found`: what lies in the run's folder, the jobs and shards below it left out."""
    there = {info.key for info in found}
    part = Part(runs=1, objects=len(found), bytes=sum(info.size for info in found))
    index = _index(storage, base, part)
    if index is None:
        return part
    named = {f"{base}/{name}" for name in _NAMES}
    for one in index.parts:
        key = f"{base}/manifest/{one.key.rpartition('/')[2]}"  # this root may lie deeper than the run's
        named.add(key)
        part.findings += _check_rows(key, one.count, one.sha256, read(storage, key))
    extra = sorted(key for key in there - named if not _is_note(key))
    part.findings += [Finding(key, "extra", "run.json does not name it") for key in extra]
    if f"{base}/_SUCCESS" in there:
        part.findings += _check_success(storage, f"{base}/_SUCCESS", index)
    return part


def _is_note(key: str) -> bool:
    """Whether it is one of those that a run puts before its rows are settled (unread.py)."""
    found = _MEMBER.fullmatch(key)
    return found is not None and found["note"] is not None


def _index(storage: Storage, base: str, part: Part) -> RunIndex | None:
    key = f"{base}/run.json"
    text = read(storage, key)
    if text is None:
        part.findings.append(Finding(key, "missing", "the index of a run's plan"))
        return None
    try:
        return RunIndex.model_validate_json(text)
    except ValidationError as error:
        part.findings.append(Finding(key, "wrong", f"cannot be read: {error.error_count()} errors"))
        return None


def _check_rows(key: str, count: int, sha256: str, data: bytes | None) -> list[Finding]:
    if data is None:
        return [Finding(key, "missing", f"{count} rows of the plan are named and not there")]
    return list(check_bytes(key, len(data), sha256, data))


def _check_success(storage: Storage, key: str, index: RunIndex) -> list[Finding]:
    try:
        content = json.loads(storage.get(key))
        digest, planned = content["manifest"], content["planned"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return [Finding(key, "wrong", f"cannot be read: {type(error).__name__}")]
    if (digest, planned) != (index.spec.digest, index.planned):
        return [Finding(key, "wrong", "of another plan than run.json's")]
    return []
