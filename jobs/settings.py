"""Where Redis is, how its keys are called, and how long things live. Read from SAGGAR_* variables.

`connect` and `connect_async` are the only places where a client is made from a URL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Self, TypeVar
from urllib.parse import parse_qs, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from saggar.jobs.errors import ConfigError, InvalidJob
from saggar.jobs.invalid import one_line

if TYPE_CHECKING:
    import redis
    import redis.asyncio

C = TypeVar("C")
DAY_S = 24 * 3600
ENV_PREFIX = "SAGGAR_"
_SCHEMES = ("redis", "rediss", "unix")
_PREFIX = re.compile(r"[A-Za-z0-9._:-]{0,64}")
_TOP = re.compile(r"^\w+")
"""The field of a path such as `warmup[0].rows`."""
_RETRIES = 3
Lifetime = Annotated[int, Field(ge=1, le=3650 * DAY_S)]
"""Seconds; what is longer than ten years Redis may refuse, and a script that began is not taken back."""

Seconds = Annotated[float, Field(le=DAY_S, allow_inf_nan=False)]
"""At most a day."""


def _check_url(url: str) -> str:
    allowed = "redis://[user:password@]host:port/db, rediss://..., unix://[user:password@]/path?db=0"
    parts = urlsplit(url)
    try:
        place = parts.path if parts.scheme == "unix" else parts.hostname
        asked = parse_qs(parts.query).get("db")
        db = (asked or ["0"])[0] if parts.scheme == "unix" else parts.path.strip("/") or "0"
        # ?db= of a host means one database to redis-py and another to Celery.
        good = (
            (asked is None or parts.scheme == "unix")
            and parts.scheme in _SCHEMES
            and bool(place)
            and db.isdecimal()
            and (parts.port or 1) > 0
        )
    except ValueError:  # a port that is no number
        good = False
    if not good:
        raise ValueError(f"is not a Redis URL (allowed: {allowed})")
    return url


def _check_prefix(prefix: str) -> str:
    if not _PREFIX.fullmatch(prefix):
        raise ValueError("has a form that is not allowed (allowed: at most 64 letters, digits and . _ : -)")
    return prefix


class JobSettings(BaseModel):
    """Frozen. Times in seconds. `redis_url` may hold a password and is therefore left out of `repr`."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    redis_url: Annotated[str, AfterValidator(_check_url), Field(repr=False)] = "redis://localhost:6379/0"
    key_prefix: Annotated[str, AfterValidator(_check_prefix)] = "saggar:"
    result_key_prefix: Annotated[str, AfterValidator(_check_prefix)] = "celery-task-meta-"
    record_ttl_s: Lifetime = 7 * DAY_S  # how long an ended job is known
    event_ttl_s: Lifetime = DAY_S  # how long its events can be replayed
    result_ttl_s: Lifetime = DAY_S  # how long Celery's AsyncResult answers
    tombstone_ttl_s: Lifetime = DAY_S  # how long a cancel waits for its job
    max_backlog: int = Field(default=1_000_000, ge=0, le=10**12)  # messages in one lane; 0 is no limit
    low_water: float = Field(default=0.9, gt=0, le=1)  # share of max_backlog at which a full lane opens again
    retry_after_s: Seconds = Field(default=5.0, gt=0)
    job_events_max: int = Field(default=1_000, ge=10, le=10**9)
    run_events_max: int = Field(default=100_000, ge=10, le=10**9)
    # A run's controller without a sign of life.
    run_lease_s: Seconds = Field(default=15.0, ge=1)
    card_cache_s: Seconds = Field(default=5.0, ge=0)
    # A read may wait for 2 s.
    socket_timeout_s: Seconds = Field(default=30.0, ge=5)

    @classmethod
    def make(cls, **values: object) -> Self:
        """Settings from values. Raises ConfigError, one line, without the values."""
        return cls._named(values, {})

    @classmethod
    def from_env(
        cls,
        env: Mapping[str, str] | None = None,
        flags: Mapping[str, tuple[str, object]] = MappingProxyType({}),
    ) -> Self:
        """Settings from SAGGAR_REDIS_URL, SAGGAR_KEY_PREFIX and so on; other variables are not looked at, and an empty
        one is not set. `flags` stand above them: by field what a flag is called, and its value.

        Raises ConfigError, which names the variable or the flag.
        """
        found = from_environment(cls.model_fields, os.environ if env is None else env)
        names = {field: variable(field) for field in found}
        values = found | {field: value for field, (_, value) in flags.items()}
        return cls._named(values, names | {field: name for field, (name, _) in flags.items()})

    @classmethod
    def _named(cls, values: Mapping[str, object], names: Mapping[str, str]) -> Self:
        """`names`: what an error calls a field."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise wrong_setting(error, cls.model_fields, names) from None


def variable(field: str) -> str:
    """The environment variable of a field."""
    return ENV_PREFIX + field.upper()


def from_environment(fields: Iterable[str], env: Mapping[str, str]) -> dict[str, object]:
    """What the environment says of these fields. A variable that is empty is not set."""
    return {field: value for field in fields if (value := env.get(variable(field)))}


def wrong_setting(error: ValidationError, fields: Iterable[str], names: Mapping[str, str]) -> ConfigError:
    """One line for the first of pydantic's errors; `names`: what it calls a field whose value came from elsewhere."""
    line = one_line(error, {"": fields}, top="settings")
    field = _TOP.sub(lambda top: names.get(top[0], top[0]), line.field)
    return ConfigError(str(InvalidJob(field, line.message, line.allowed)))


def connect(settings: JobSettings) -> redis.Redis:
    """A client with its own pool that answers in text. Commands are sent again after a lost connection, so
    every script of ours bears being sent twice. Raises ConfigError for a URL that cannot be used; does not
    connect yet."""
    import redis
    from redis.retry import Retry

    return _client(redis.Redis.from_url, settings, Retry)


def connect_async(settings: JobSettings) -> redis.asyncio.Redis:
    """The same for asyncio."""
    import redis.asyncio
    from redis.asyncio.retry import Retry

    return _client(redis.asyncio.Redis.from_url, settings, Retry)


def _client(make: Callable[..., C], settings: JobSettings, retry: Callable[..., object]) -> C:
    from redis.backoff import ExponentialWithJitterBackoff

    try:
        return make(
            settings.redis_url,
            decode_responses=True,
            retry=retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), _RETRIES),
            socket_timeout=settings.socket_timeout_s,
            socket_connect_timeout=5.0,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"redis_url: {error}") from None
