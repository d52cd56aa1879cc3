"""Where objects go: pure functions from a job to its keys, and the check that every key passes.

    {prefix}/{job}/a{attempt}/{index}-{sha8}.{ext}     an output
    {prefix}/{job}/a{attempt}/{index}p{part}-{sha8}…   of one that is several files: a frame, a layer
    {prefix}/{job}/a{attempt}/{index}-{sha8}.json      its sidecar
    {prefix}/{job}/result.json                         the manifest, written once

A key is parts joined by `/`. Parts are plain ASCII and never start with a dot, so the same key is safe as a
path, in a URL and in every S3 store; names with a dot in front stay free for a store's own use.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from saggar.storage.errors import InvalidKey

MAX_KEY_BYTES = 1024  # S3's limit
MAX_PART_BYTES = 200  # file systems stop at 255; temporary names need a few
RESULT_NAME = "result.json"

_PART = re.compile(r"[A-Za-z0-9_+=@,][A-Za-z0-9_+=@,.~-]*", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_EXTENSION = re.compile(r"[a-z0-9]{1,10}")
_ATTEMPT_KEY = re.compile(
    r"(?P<job>.+)/a(?P<attempt>[1-9][0-9]*)/[0-9]+(p[0-9]+)?-[0-9a-f]{8}\.[a-z0-9]{1,10}", re.ASCII
)


def check_key(key: str) -> str:
    """The key itself, or InvalidKey naming the part that is wrong."""
    if not key or len(key) > MAX_KEY_BYTES:
        raise InvalidKey(f"a key has 1 to {MAX_KEY_BYTES} characters, this one {len(key)}")
    for part in key.split("/"):
        _check_part(part, key)
    return key


def check_prefix(prefix: str) -> str:
    """A prefix without its closing slash; "" is the store's root."""
    trimmed = prefix.removesuffix("/")
    return check_key(trimmed) if trimmed else ""


def job_prefix(prefix: str, job_id: str) -> str:
    """Everything of one job lies under this key and a slash."""
    if "/" in job_id:
        raise InvalidKey(f"a job's id is one part of a key, so {job_id!r} may hold no slash")
    base = check_prefix(prefix)
    return check_key(f"{base}/{job_id}" if base else job_id)


def attempt_prefix(prefix: str, job_id: str, attempt: int) -> str:
    """The place of one attempt: no two attempts ever write the same key."""
    if attempt < 1:
        raise InvalidKey(f"attempts count from 1, not {attempt}")
    return f"{job_prefix(prefix, job_id)}/a{attempt}"


def output_key(
    prefix: str, job_id: str, attempt: int, index: int, sha256: str, extension: str, part: int | None = None
) -> str:
    """The key of output `index`; its bytes' hash is part of the name, so equal names hold equal bytes. `part` of one
    that is several files.
    """
    if index < 0:
        raise InvalidKey(f"outputs count from 0, not {index}")
    if not _SHA256.fullmatch(sha256):
        raise InvalidKey(f"a sha256 has 64 hexadecimal digits in lower case: {sha256!r}")
    if not _EXTENSION.fullmatch(extension):
        raise InvalidKey(f"an extension has 1 to 10 letters or digits and no dot: {extension!r}")
    name = f"{index}" if part is None else f"{index}p{part:04d}"
    return check_key(f"{attempt_prefix(prefix, job_id, attempt)}/{name}-{sha256[:8]}.{extension}")


def sidecar_key(
    prefix: str, job_id: str, attempt: int, index: int, sha256: str, part: int | None = None
) -> str:
    """The sidecar beside an output; `sha256` and `part` are the output's."""
    return output_key(prefix, job_id, attempt, index, sha256, "json", part)


def result_key(prefix: str, job_id: str) -> str:
    """The manifest's key: the one key of a job that is written once."""
    return f"{job_prefix(prefix, job_id)}/{RESULT_NAME}"


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """What an attempt's object says of itself by its key: the job's prefix, the job and the attempt."""

    job_prefix: str
    job_id: str
    attempt: int


def parse_attempt(key: str) -> AttemptKey | None:
    """The attempt whose output or sidecar a key names, or None for any other key, valid or not."""
    found = _ATTEMPT_KEY.fullmatch(key)
    if found is None or not _is_key(key):
        return None
    job = found["job"]
    return AttemptKey(job, job.rpartition("/")[2], int(found["attempt"]))


def _is_key(key: str) -> bool:
    try:
        check_key(key)
    except InvalidKey:
        return False
    return True


def _check_part(part: str, key: str) -> None:
    if not _PART.fullmatch(part):
        raise InvalidKey(
            f"{part!r} in {key!r}: a part has letters, digits and _+=@,.~- and starts with no dot, dash or ~"
        )
    if len(part) > MAX_PART_BYTES:
        raise InvalidKey(f"a part of a key has at most {MAX_PART_BYTES} characters: {part[:20]!r}…")
