"""What a job is: the words a producer may use, checked once, in one place.

A `Job` knows nothing of a model's own parameters: those are checked against the model's card
(cards.py). `Job(...)` and `parse_job` raise `InvalidJob`, one line that names the field and what is
allowed, never pydantic's own error.
"""

from __future__ import annotations

import re
from datetime import datetime
from hashlib import sha256
from math import isfinite
from typing import Annotated, Literal, Self
from uuid import uuid4

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from saggar.jobs.errors import InvalidJob
from saggar.jobs.invalid import one_line
from saggar.jobs.lanes.message import PRIORITY_CLASSES, Priority

MAX_JOB_BYTES = 64 * 1024
MAX_SEED = 2**63 - 1
MAX_OUTPUTS = 1024
MAX_PARAMS = 128
MAX_MODEL = 128

Scalar = bool | int | float | str | None
ParamValue = Scalar | list[Scalar]
Format = Literal["png", "webp", "jpeg", "mp4", "webm", "wav", "flac"]
LOSSLESS = frozenset({"png", "wav", "flac"})

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:=/-]{0,63}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*){0,3}")
_TASK = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_PARAM = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_PREFIX_PART = re.compile(
    r"[A-Za-z0-9_+=@,][A-Za-z0-9_+=@,.~-]{0,199}"
)  # as the keys of storage, a test says so
_PRINTABLE = re.compile(r"[!-~]{1,128}")
_URI = re.compile(r"(?P<scheme>[a-z0-9]+)://(?P<host>[A-Za-z0-9][A-Za-z0-9.:-]*)?(?P<path>/[!-~]*)?")
_URIS_ALLOWED = (
    "s3://bucket/key, https://host/path or file:///absolute/path, at most 2048 printable characters"
)


def _text(pattern: re.Pattern[str], allowed: str, longest: int) -> BeforeValidator:
    """A string that matches the pattern as a whole; the caller's text is not repeated in the error."""

    def check(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"must be a string (allowed: {allowed})")
        if len(value) > longest or not pattern.fullmatch(value):
            raise ValueError(f"has a form that is not allowed (allowed: {allowed})")
        return value

    return BeforeValidator(check)


def _check_uri(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a string (allowed: {_URIS_ALLOWED})")
    match = _URI.fullmatch(value) if len(value) <= 2048 else None
    parts = match.groupdict() if match else {}
    scheme, host, path = parts.get("scheme"), parts.get("host"), parts.get("path") or ""
    whole = len(path) > 1 and not {".", ".."} & set(path.split("/"))
    if (
        not whole
        or "\\" in path
        or scheme not in ("s3", "https", "file")
        or (scheme == "file") != (host is None)
    ):
        raise ValueError(f"is not a URI that can be read (allowed: {_URIS_ALLOWED})")
    return value


def _as_tuple(value: object) -> object:
    """A list, in strict mode too; whatever else is no tuple is refused."""
    return tuple(value) if isinstance(value, list) else value


def _check_prefix(value: object) -> str:
    allowed = (
        "a relative path such as runs/cats of at most 256 characters; its parts have at most 200 of letters, "
        "digits and _+=@,.~- and start with no dot, dash or ~"
    )
    if not isinstance(value, str):
        raise ValueError(f"must be a string (allowed: {allowed})")
    if len(value) > 256 or (value and not all(_PREFIX_PART.fullmatch(part) for part in value.split("/"))):
        raise ValueError(f"is not a safe path (allowed: {allowed})")
    return value


def _check_unicode(value: str) -> str:
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError("is not valid Unicode (allowed: text without lone surrogates)")
    if "\0" in value:
        raise ValueError("has a NUL character (allowed: text without it)")
    return value


def _check_time(value: object) -> object:
    if not isinstance(value, str | datetime):
        raise ValueError(
            "must be a time (allowed: an ISO 8601 time with a zone, such as 2030-01-31T12:00:00Z)"
        )
    return value


NAME_ALLOWED = "1 to 128 letters, digits and . _ - that begin with a letter or digit"
JobId = Annotated[str, _text(_ID, NAME_ALLOWED, 128)]
Uri = Annotated[str, BeforeValidator(_check_uri)]
Tag = Annotated[str, _text(_TAG, "1 to 64 letters, digits and . _ : = / -", 64)]
Time = Annotated[AwareDatetime, Field(strict=False), BeforeValidator(_check_time)]
Text = Annotated[str, AfterValidator(_check_unicode)]
# Tuples: then `Inputs` can be hashed, and pydantic gives all jobs without files one default instead of a deep copy.
Uris = Annotated[tuple[Uri, ...], Field(max_length=16), BeforeValidator(_as_tuple)]


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class Inputs(_Part):
    """URIs of what the job starts from, by kind, in order."""

    image: Uris = ()
    mask: Uris = ()
    audio: Uris = ()
    video: Uris = ()


class Lora(_Part):
    """An adapter by the name under which the worker knows it, and its strength."""

    name: Annotated[str, _text(_MODEL, "letters, digits, . _ - and /, at most 128 characters", 128)]
    scale: float = Field(default=1.0, ge=-16, le=16)


class OutputSpec(_Part):
    """How results are written. `format` None is the model's own first format; `prefix` is a path below
    the worker's storage root; `quality` is for the lossy formats only."""

    format: Format | None = None
    quality: int | None = Field(default=None, ge=1, le=100)
    prefix: Annotated[str, BeforeValidator(_check_prefix)] = ""


def check_id(job_id: str) -> str:
    """The id itself. Raises InvalidJob for one that no job can have: it would become part of Redis's keys."""
    if not isinstance(job_id, str) or not _ID.fullmatch(job_id):
        raise InvalidJob("id", "has a form that is not allowed", NAME_ALLOWED)
    return job_id


def new_id() -> str:
    """32 hexadecimal digits, random."""
    return uuid4().hex


def is_model_name(name: str) -> bool:
    """Whether jobs can ask for a model of this name."""
    return len(name) <= MAX_MODEL and _MODEL.fullmatch(name) is not None


class Job(_Part):
    """One generation job as a producer states it. Frozen; unknown fields are refused.

    Raises InvalidJob from every way of making one.
    """

    version: Literal[1] = 1
    id: JobId = Field(default_factory=new_id)
    model: Annotated[str, _text(_MODEL, "the name of a served model, such as saggar/emoji", MAX_MODEL)]
    task: Annotated[str, _text(_TASK, "a task of the model, such as t2i", 32)] = "t2i"
    prompt: Text = Field(repr=False)  # what people ask for stays out of logs
    negative_prompt: Text | None = Field(default=None, repr=False)
    params: dict[str, ParamValue] = {}
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    num_outputs: int = Field(default=1, ge=1, le=MAX_OUTPUTS)
    inputs: Inputs = Inputs()
    loras: list[Lora] = Field(default=[], max_length=16)
    output: OutputSpec = OutputSpec()
    priority: Priority = "bulk"
    deadline: Time | None = None
    not_before: Time | None = None
    tags: list[Tag] = Field(default=[], max_length=16)
    tenant: Annotated[str, _text(_ID, NAME_ALLOWED, 128)] | None = None
    run: Annotated[str, _text(_ID, NAME_ALLOWED, 128)] | None = None
    idempotency_key: Annotated[str, _text(_PRINTABLE, "1 to 128 printable ASCII characters", 128)] | None = (
        None
    )
    allow_unserved: bool = False

    @model_validator(mode="wrap")
    @classmethod
    def _clear_errors(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            raise one_line(error, _FIELDS) from None

    @field_validator("params", mode="plain")
    @classmethod
    def _check_params(cls, value: object) -> dict[str, ParamValue]:
        """A plain walk: pydantic's unions would answer one bad value with five errors. Sorted by name, so
        that equal jobs have equal JSON."""
        if not isinstance(value, dict):
            raise InvalidJob("params", "must be an object", "names with scalars or lists of scalars")
        if len(value) > MAX_PARAMS:
            raise InvalidJob("params", "has too many items", f"at most {MAX_PARAMS}")
        for name, item in value.items():
            if not isinstance(name, str) or not _PARAM.fullmatch(name):
                raise InvalidJob("params", "has a name of a form that is not allowed", "identifiers")
            _check_param(f"params.{name}", item)
        return dict(sorted(value.items()))

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.seed is not None and self.seed + self.num_outputs - 1 > MAX_SEED:
            top = MAX_SEED - self.num_outputs + 1
            raise InvalidJob("seed", f"is too large for {self.num_outputs} outputs", f"0 to {top}")
        if self.deadline and self.not_before and self.deadline <= self.not_before:
            raise InvalidJob("deadline", "is not after not_before", "a time after not_before, or none")
        if len(set(self.tags)) != len(self.tags):
            raise InvalidJob("tags", "has the same tag twice", "different tags")
        return self

    @property
    def has_inputs(self) -> bool:
        """It starts from files."""
        return any(uris for _, uris in self.inputs)

    @property
    def priority_class(self) -> int:
        """0 interactive, 1 normal, 2 bulk: lower goes first."""
        return PRIORITY_CLASSES[self.priority]

    def to_json(self) -> str:
        """The job as compact JSON without the fields left at their defaults.

        Raises InvalidJob naming the largest field when it has more than 64 KiB.
        """
        text = self.model_dump_json(exclude_defaults=True)
        if len(text) * 4 > MAX_JOB_BYTES and len(text.encode()) > MAX_JOB_BYTES:
            sizes = {name: len(str(value)) for name, value in self if name in self.model_fields_set}
            largest = max(sizes, key=lambda name: sizes[name])
            raise InvalidJob(
                largest, "the job is too large", f"a job of at most {MAX_JOB_BYTES} bytes as JSON"
            )
        return text

    def digest(self) -> str:
        """32 hexadecimal digits over everything but the id: equal for equal work, as it was asked for."""
        spec = self.model_dump_json(exclude_defaults=True, exclude={"id"})
        return sha256(spec.encode()).hexdigest()[:32]


def _check_param(field: str, value: object) -> None:
    if isinstance(value, list):
        if len(value) > 4096:
            raise InvalidJob(field, "has too many items", "at most 4096")
        for index, item in enumerate(value):
            if isinstance(item, list):
                raise InvalidJob(
                    f"{field}[{index}]", "must be a scalar", "true, false, null, a number or a string"
                )
            _check_param(f"{field}[{index}]", item)
    elif value is None or isinstance(value, bool):
        return
    elif isinstance(value, int):
        if abs(value) > MAX_SEED:
            raise InvalidJob(field, "is too large", "integers of 63 bits")
    elif isinstance(value, float):
        if not isfinite(value):
            raise InvalidJob(field, "must be a finite number", "no NaN, no infinity")
    elif isinstance(value, str):
        try:
            _check_unicode(value)
        except ValueError as error:
            raise InvalidJob(field, str(error)) from None
    else:
        raise InvalidJob(field, "has a type that is not allowed", "a JSON scalar or a list of scalars")


_FIELDS: dict[str, tuple[str, ...]] = {
    "": tuple(Job.model_fields),
    "inputs": tuple(Inputs.model_fields),
    "output": tuple(OutputSpec.model_fields),
    "loras": tuple(Lora.model_fields),
}


def read_job(text: str) -> Job:
    """A job from a record, perhaps of a newer producer: fields that are not known here are left out.

    Raises InvalidJob when the rest cannot be understood.
    """
    try:
        return Job.model_validate_json(text, extra="ignore")
    except ValidationError as error:  # text that is not JSON never reaches the model's own validator
        raise one_line(error, _FIELDS) from None


def parse_job(data: Job | dict[str, object] | str | bytes) -> Job:
    """A job from a Job, a mapping or JSON text. Raises InvalidJob."""
    if isinstance(data, Job):
        return data
    if not isinstance(data, str | bytes):
        return Job.model_validate(data)
    try:
        return Job.model_validate_json(data)
    except ValidationError as error:  # text that is not JSON never reaches the model's own validator
        raise one_line(error, _FIELDS) from None
