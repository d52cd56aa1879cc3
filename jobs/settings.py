"""Where Redis is, how its keys are called, and how long things live. Read from SAGGAR_* variables.

`connect` and `connect_async` are the only places where a client is made from a URL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Self
from urllib.parse import parse_qs, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from saggar.jobs.errors import ConfigError, InvalidJob
from saggar.jobs.invalid import one_line

if TYPE_CHECKING:
    import redis
    import redis.asyncio

DAY_S = 24 * 3600
ENV_PREFIX = "SAGGAR_"
_SCHEMES = ("redis", "rediss", "unix")
_PREFIX = re.compile(r"[A-Za-z0-9._:-]{0,64}")
_TOP = re.compile(r"^\w+")
"""The field of a path such as `warmup[0].rows`."""
_RETRIES = 3
Lifetime = Annotated[int, Field(ge=1, le=3650 * DAY_S)]
"""Seconds; what is longer than ten years Redis may refuse, and a script that began is not taken back."""


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
    retry_after_s: float = Field(default=5.0, gt=0, le=DAY_S, allow_inf_nan=False)
    job_events_max: int = Field(default=1_000, ge=10, le=10**9)
    run_events_max: int = Field(default=100_000, ge=10, le=10**9)
    # A run's controller without a sign of life.
    run_lease_s: float = Field(default=15.0, ge=1, le=DAY_S, allow_inf_nan=False)
    card_cache_s: float = Field(default=5.0, ge=0, le=DAY_S, allow_inf_nan=False)
    # A read may wait for 2 s.
    socket_timeout_s: float = Field(default=30.0, ge=5, le=DAY_S, allow_inf_nan=False)

    @classmethod
    def make(cls, **values: object) -> Self:
        """Settings from values. Raises ConfigError, one line, without the values."""
        return cls._named(values, {})

    @classmethod
    def from_env(
        cls, env: Mapping[str, str] | None = None, named: Mapping[str, str] = MappingProxyType({})
    ) -> Self:
        """Settings from SAGGAR_REDIS_URL, SAGGAR_KEY_PREFIX and so on; other variables are not looked at.

        Raises ConfigError, which names the variable, or a field as it is `named`.
        """
        source = os.environ if env is None else env
        names = {name: ENV_PREFIX + name.upper() for name in cls.model_fields}
        values = {name: source[variable] for name, variable in names.items() if variable in source}
        return cls._named(values, {**names, **named})

    @classmethod
    def _named(cls, values: Mapping[str, object], names: Mapping[str, str]) -> Self:
        """`names`: what an error calls a field."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise wrong_setting(error, cls.model_fields, names) from None


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
    from redis.backoff import ExponentialWithJitterBackoff
    from redis.retry import Retry

    retry = Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), _RETRIES)
    try:
        return redis.Redis.from_url(
            settings.redis_url,
            decode_responses=True,
            retry=retry,
            socket_timeout=settings.socket_timeout_s,
            socket_connect_timeout=5.0,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"redis_url: {error}") from None


def connect_async(settings: JobSettings) -> redis.asyncio.Redis:
    """The same for asyncio."""
    import redis.asyncio
    from redis.asyncio.retry import Retry
    from redis.backoff import ExponentialWithJitterBackoff

    retry = Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), _RETRIES)
    try:
        return redis.asyncio.Redis.from_url(
            settings.redis_url,
            decode_responses=True,
            retry=retry,
            socket_timeout=settings.socket_timeout_s,
            socket_connect_timeout=5.0,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"redis_url: {error}") from None
