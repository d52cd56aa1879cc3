"""A picture and its sidecar as a sample of a data set, and a sample back as the job that made it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue
from saggar.jobs.schema import Job, read_job
from saggar.storage.samples import Sample
from saggar.workers.encode import FACTS


@dataclass(frozen=True)
class Recorded:
    """What is known of a picture that was made: the job, the picture's own seed, and what made it."""

    name: str
    picture: bytes
    job: Job
    seed: int
    model: str
    revision: str
    numerics: str


def sample_of(key: str, picture: bytes, extension: str, sidecar: Mapping[str, JsonValue]) -> Sample:
    """The sample of one output: its prompt is the caption; `request` in its metadata is enough to make it again.

    `sidecar` is what `encode.sidecar` wrote. Raises ValueError when it is something else.
    """
    try:
        request, model, file = (
            _object(sidecar["request"]),
            _object(sidecar["model"]),
            _object(sidecar["file"]),
        )
        metadata: dict[str, JsonValue] = {
            "seed": sidecar["seed"],
            "sha256": file["sha256"],
            **{name: file[name] for name in FACTS if name in file},
            "model": model["name"],
            "revision": model["revision"],
            "numerics": sidecar["numerics"],
            "parameters": request["params"],
            "job": sidecar["job_id"],
            "index": sidecar["index"],
            "steps": sidecar["steps"],
            "batch": sidecar["batch"],
            "versions": sidecar["versions"],
            "request": dict(request),
            **({"unread": sidecar["unread"]} if "unread" in sidecar else {}),
        }
    except KeyError as error:
        raise ValueError(f"{key}: its sidecar has no {error}") from error
    return Sample(key, {extension: picture}, str(request.get("prompt", "")), metadata)


def recorded_of(sample: Sample) -> Recorded:
    """The other way round. Raises ValueError, and InvalidJob when the request is none."""
    metadata = sample.metadata
    missing = [name for name in ("request", "seed", "model", "revision", "numerics") if name not in metadata]
    if missing or sample.primary is None:
        raise ValueError(f"no {missing[0] if missing else 'picture'} is recorded")
    job = read_job(json.dumps({"id": "sample", **_object(metadata["request"])}))
    return Recorded(
        name=sample.key,
        picture=sample.files[sample.primary],
        job=job,
        seed=int(str(metadata["seed"])),
        model=str(metadata["model"]),
        revision=str(metadata["revision"]),
        numerics=str(metadata["numerics"]),
    )


def _object(value: JsonValue) -> Mapping[str, JsonValue]:
    if not isinstance(value, dict):
        raise ValueError("the sidecar's request, model and file are objects")
    return value
