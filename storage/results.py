"""The manifest of a job, `result.json`: written once, and from then on the job can only succeed.

Two attempts may both reach this point after a crash. One PUT wins; the other reads what won, convinces
itself that it is whole and answers the same request, and reports it as the result. Knows nothing of queues
or ledgers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)
from saggar.storage.base import Storage
from saggar.storage.errors import Conflict, NotFound

_JSON = "application/json"
_HEX64 = r"^[0-9a-f]{64}$"
_LATER = ("part", "frames", "fps", "duration_s", "sample_rate", "channels")


class ManifestFile(BaseModel):
    """An object that a result consists of: `size` in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    sha256: str = Field(pattern=_HEX64)
    size: int = Field(ge=0)
    content_type: str


class ManifestOutput(ManifestFile):
    """One output, or one `part` of one that is several files (frames, layers), which count from 0.

    `width` and `height` in pixels, `duration_s` in seconds, `sample_rate` in Hz, where it has them.
    """

    index: int = Field(ge=0)
    width: int | None = None
    height: int | None = None
    seed: int | None = None
    sidecar: ManifestFile | None = None
    part: int | None = Field(default=None, ge=0)
    frames: int | None = None
    fps: float | None = None
    duration_s: float | None = None
    sample_rate: int | None = None
    channels: int | None = None

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        """What pictures do not have is left out: older readers take no name that they do not know."""
        whole: dict[str, object] = handler(self)
        return {name: value for name, value in whole.items() if name not in _LATER or value is not None}


class ManifestUnread(BaseModel):
    """A text of the request that is longer than the model reads: of its `tokens` tokens the first `read_tokens`
    count.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    field: str
    read_tokens: int = Field(ge=0)
    tokens: int = Field(ge=0)


class ResultManifest(BaseModel):
    """A job's result; `spec_sha256` is `spec_digest` of the request it answers, `timings` in seconds. `unread`: texts
    that were too long; None without any."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = 1
    job_id: str
    attempt: int = Field(ge=1)
    spec_sha256: str = Field(pattern=_HEX64)
    model: str
    created: AwareDatetime
    outputs: tuple[ManifestOutput, ...]
    batch_id: str | None = None
    batch_size: int | None = None
    numerics: str | None = None
    timings: dict[str, float] = Field(default_factory=dict)
    unread: tuple[ManifestUnread, ...] | None = None

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        """As ManifestOutput: no name that older readers do not know where there is nothing to say."""
        whole: dict[str, object] = handler(self)
        return {name: value for name, value in whole.items() if name != "unread" or value is not None}

    def files(self) -> Iterator[ManifestFile]:
        """Outputs and sidecars."""
        for output in self.outputs:
            yield output
            if output.sidecar is not None:
                yield output.sidecar

    def to_bytes(self) -> bytes:
        """UTF-8 JSON with sorted keys: equal manifests are equal bytes."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, ensure_ascii=False).encode()


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """`won`: this attempt's manifest stands. Otherwise `manifest` is the one that does."""

    won: bool
    manifest: ResultManifest


def spec_digest(spec: Mapping[str, object]) -> str:
    """sha256 of a request as canonical JSON (sorted keys, no spaces, UTF-8)."""
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def commit_result(storage: Storage, key: str, manifest: ResultManifest) -> CommitOutcome:
    """Make `manifest`, whose objects are in place, the job's result, or accept the one that is there already.

    On a store without conditional PUT the caller must have let another judge decide first (the ledger's
    commit): there, only the attempt that won may call this.

    Raises Conflict when what is there is damaged or answers another request.
    """
    data = manifest.to_bytes()
    if storage.conditional_put:
        if storage.put_if_absent(key, data, content_type=_JSON):
            return CommitOutcome(True, manifest)
    elif storage.head(key) is None:
        storage.put(key, data, content_type=_JSON)
        return CommitOutcome(True, manifest)
    found = read_result(storage, key)
    if found == manifest:  # our own, from before a crash
        return CommitOutcome(True, found)
    if (found.job_id, found.spec_sha256) != (manifest.job_id, manifest.spec_sha256):
        raise Conflict(f"{key} is the result of another request ({found.job_id}, {found.spec_sha256[:8]})")
    verify_result(storage, found)
    return CommitOutcome(False, found)


def read_result(storage: Storage, key: str) -> ResultManifest:
    """The manifest under a key. Raises NotFound, or Conflict when it cannot be read as one."""
    data = storage.get(key)
    try:
        return ResultManifest.model_validate_json(data)
    except ValidationError as error:
        raise Conflict(f"{key} is no manifest: {error.error_count()} errors") from error


def verify_result(storage: Storage, manifest: ResultManifest) -> None:
    """Read every object of a result and compare its hash.

    Raises Conflict on the first that is missing or differs.
    """
    for file in manifest.files():
        try:
            data = storage.get(file.key)
        except NotFound as error:
            raise Conflict(f"{file.key} is in the manifest and not in the store") from error
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise Conflict(f"{file.key} holds other bytes than its manifest says")
