"""Settings: the forms of a Redis URL, the environment, one clear line for what is wrong."""

from __future__ import annotations

import pytest
from saggar.jobs import ConfigError, JobSettings, connect


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://localhost", {"host": "localhost", "db": 0}),
        (
            "redis://user:p%40ss@host:7000/3",
            {"host": "host", "port": 7000, "username": "user", "password": "p@ss", "db": 3},
        ),
        ("redis://:pw@host/1", {"password": "pw", "db": 1}),
        ("rediss://host:6380/2", {"host": "host", "port": 6380, "db": 2}),
        ("unix:///run/redis.sock?db=4", {"path": "/run/redis.sock", "db": 4}),
        ("unix://user:pw@/run/redis.sock", {"path": "/run/redis.sock", "username": "user", "password": "pw"}),
    ],
)
def test_urls(url: str, expected: dict[str, object]) -> None:
    pool = connect(JobSettings.make(redis_url=url)).connection_pool
    found = {"db": 0, **pool.connection_kwargs}
    assert {name: found.get(name) for name in expected} == expected
    assert ("SSL" in pool.connection_class.__name__) == url.startswith("rediss")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost",
        "http://host",
        "redis://",
        "redis://host:port",
        "redis://host/x",
        "unix://",
        "amqp://h",
        "redis://host?db=3",
        "rediss://host/1?db=1",
        "unix:///run/redis.sock?db=x",
    ],
)
def test_wrong_urls(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis_url: is not a Redis URL \(allowed: redis://"):
        JobSettings.make(redis_url=url)


def test_a_wrong_option_of_the_url() -> None:
    with pytest.raises(ConfigError, match="redis_url"):
        connect(JobSettings.make(redis_url="redis://host?socket_timeout=soon"))


def test_from_the_environment() -> None:
    env = {
        "SAGGAR_REDIS_URL": "redis://h/2",
        "SAGGAR_KEY_PREFIX": "app:",
        "SAGGAR_MAX_BACKLOG": "7",
        "HOME": "/",
    }
    settings = JobSettings.from_env(env)
    assert (settings.redis_url, settings.key_prefix, settings.max_backlog) == ("redis://h/2", "app:", 7)
    assert JobSettings.from_env({}) == JobSettings.make()


def test_an_empty_variable_is_not_set() -> None:
    empty = {f"SAGGAR_{name.upper()}": "" for name in JobSettings.model_fields}
    assert JobSettings.from_env(empty) == JobSettings.make()


def test_a_flag_stands_above_its_variable_also_when_it_is_empty() -> None:
    env = {"SAGGAR_REDIS_URL": "redis://h/2"}
    assert JobSettings.from_env(env, {"redis_url": ("--redis", "redis://f/1")}).redis_url == "redis://f/1"
    for wrong in ("", "x"):
        with pytest.raises(ConfigError, match=r"^--redis: is not a Redis URL"):
            JobSettings.from_env(env, {"redis_url": ("--redis", wrong)})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("record_ttl_s", "0"),
        ("max_backlog", "many"),
        ("key_prefix", "a b"),
        ("key_prefix", "x'y"),
        ("retry_after_s", "nan"),
        ("colour", "red"),
    ],
)
def test_wrong_values(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: "):
        JobSettings.make(**{name: value})


def test_every_number_has_bounds_that_redis_bears() -> None:
    """A script that fails at an expiry has written already what came before."""
    for name, value in JobSettings.make():
        if type(value) in (int, float):
            for wrong in ("nan", "inf", "1e400", "9" * 40, "-1"):
                with pytest.raises(ConfigError, match=rf"^SAGGAR_{name.upper()}: .+ \(allowed: .+\)$"):
                    JobSettings.from_env({f"SAGGAR_{name.upper()}": wrong})


def test_passwords_are_not_shown() -> None:
    assert "hunter2" not in repr(JobSettings.make(redis_url="redis://:hunter2@host"))
    with pytest.raises(ConfigError) as caught:
        JobSettings.make(redis_url="redis://:hunter2@host/x")
    assert "hunter2" not in str(caught.value)
