"""What a lane carries: a lane's name, a message's place in it, and the smallest message Celery understands.

Knows kombu's JSON form of a message and Celery's protocol 2; knows neither Redis nor kombu's code. A lane
stores a message as short as it came; `inflate` adds at delivery whatever can be derived.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias, get_args

LANE_PREFIX: Final = "gen."
Priority = Literal["interactive", "normal", "bulk"]  # the first goes first
PRIORITY_CLASSES: Final[Mapping[str, int]] = {name: number for number, name in enumerate(get_args(Priority))}
DEFAULT_CLASS: Final = PRIORITY_CLASSES["bulk"]
# Message headers that place a message. kombu's own priority is not used: on Redis its 0 means the highest.
CLASS_HEADER: Final = "lane_class"
KEY_HEADER: Final = "lane_key"
ROWS_HEADER: Final = "lane_rows"
SEPARATOR: Final = "\x1f"

_compact = json.JSONEncoder(separators=(",", ":")).encode
Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"


@lru_cache(maxsize=1024)
def lane_name(model: str) -> str:
    """The lane of a model: "saggar/emoji" -> "gen.saggar--emoji". Different models never share a lane."""
    slug = re.sub(r"[^A-Za-z0-9._-]", "-", model.replace("/", "--"))
    if slug.replace("--", "/") != model:
        slug = f"{slug}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"
    return LANE_PREFIX + slug


def lane_base(prefix: str, lane: str) -> str:
    """The one Redis key from which the scripts derive all keys of a lane."""
    return prefix + lane


@dataclass(frozen=True, slots=True)
class Tag:
    """A delivery: which message, and which time it was handed out (the fencing number)."""

    lane: str
    id: str
    delivery: int

    def __str__(self) -> str:
        return f"{self.lane}{SEPARATOR}{self.id}{SEPARATOR}{self.delivery}"

    @classmethod
    def parse(cls, text: str) -> "Tag":
        lane, id_, delivery = text.split(SEPARATOR)
        return cls(lane, id_, int(delivery))


@dataclass(frozen=True, slots=True)
class LaneMessage:
    """A message and its place. `uuid` tells one publication from another of the same task; `eta_us` 0 = now.

    Raises ValueError when a field could not be stored faithfully.
    """

    lane: str
    tag: str
    uuid: str
    priority_class: int
    batch_key: str
    rows: int
    eta_us: int
    body: str

    def __post_init__(self) -> None:
        for name in ("lane", "tag", "uuid", "batch_key"):
            text = getattr(self, name)
            if not text or SEPARATOR in text:
                raise ValueError(f"{name}: {text!r} is empty or contains the unit separator")
        if not 0 <= self.priority_class <= 9:
            raise ValueError(f"{CLASS_HEADER}: {self.priority_class} (allowed: 0 to 9, or a class name)")
        if self.rows < 1 or self.eta_us < 0:
            raise ValueError(f"rows {self.rows} must be at least 1, eta {self.eta_us} not negative")

    def args(self) -> tuple[str, str, int, str, int, int, str]:
        """The arguments of `lane_put` that follow the base."""
        return (self.tag, self.uuid, self.priority_class, self.batch_key, self.rows, self.eta_us, self.body)


def celery_message(
    task: str,
    job_id: str,
    lane: str,
    *,
    priority_class: int,
    batch_key: str,
    rows: int,
    eta_us: int = 0,
    headers: Mapping[str, Json] | None = None,
    embed: Mapping[str, Json] | None = None,
) -> LaneMessage:
    """The call `task(job_id)` under the task id `job_id`, as short as a stock Celery worker accepts it.

    `headers` are added to the message's (parent_id, group, custom ones); `embed` are protocol 2's callbacks,
    errbacks, chain and chord, so that links go along.
    """
    body = _compact([[job_id], {}, dict(embed or {})])
    payload = {"body": body, "headers": {"task": task, "id": job_id, **(headers or {})}}
    return LaneMessage(
        lane=lane,
        tag=job_id,
        uuid=uuid.uuid4().hex[:16],
        priority_class=priority_class,
        batch_key=batch_key,
        rows=rows,
        eta_us=eta_us,
        body=_compact(payload),
    )


def lane_message(lane: str, payload: Mapping[str, Any], body: str) -> LaneMessage:
    """Places a message published through kombu, by its headers. `body` is `payload` as text.

    Without headers of ours: class bulk, the task's name as the batch key, one row, the eta of Celery.
    """
    headers: Mapping[str, Any] = payload.get("headers") or {}
    delivery_tag = str(payload["properties"]["delivery_tag"])
    return LaneMessage(
        lane=lane,
        tag=str(headers.get("id") or delivery_tag),
        uuid=delivery_tag,
        priority_class=_priority_class(headers.get(CLASS_HEADER)),
        batch_key=str(headers.get(KEY_HEADER) or headers.get("task") or "-"),
        rows=int(headers.get(ROWS_HEADER) or 1),
        eta_us=_microseconds(headers.get("eta")),
        body=body,
    )


def inflate(
    payload: MutableMapping[str, Any], tag: Tag, priority_class: int, batch_key: str, rows: int
) -> MutableMapping[str, Any]:
    """Completes a stored message for delivery, in place, and returns it.

    Its eta goes: the lane has kept it until it was due, by the server's clock; the worker's clock has no say.
    """
    headers = payload.setdefault("headers", {})
    headers.update({CLASS_HEADER: priority_class, KEY_HEADER: batch_key, ROWS_HEADER: rows, "eta": None})
    headers.setdefault("root_id", headers.get("id"))
    headers.setdefault("argsrepr", f"('{headers.get('id')}',)")
    payload.setdefault("content-type", "application/json")
    payload.setdefault("content-encoding", "utf-8")
    properties = payload.setdefault("properties", {})
    properties["delivery_tag"] = str(tag)
    properties.setdefault("correlation_id", headers.get("id"))
    info = properties.setdefault("delivery_info", {"exchange": "", "routing_key": tag.lane})
    if tag.delivery > 1:
        info["redelivered"] = headers["redelivered"] = True
    return payload


def _priority_class(value: object) -> int:
    if value is None:
        return DEFAULT_CLASS
    text = str(value)
    return PRIORITY_CLASSES[text] if text in PRIORITY_CLASSES else int(text)


def _microseconds(eta: object) -> int:
    """Of an ISO 8601 time; without a zone it is UTC, as Celery sends it."""
    if not eta:
        return 0
    when = datetime.fromisoformat(str(eta))
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return int(when.timestamp() * 1e6)
