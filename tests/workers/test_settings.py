"""What a worker is set to: flags, variables, defaults, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from saggar.jobs.errors import ConfigError
from saggar.jobs.settings import JobSettings
from saggar.workers.settings import WorkerSettings


def test_flags_go_over_the_environment_over_defaults(tmp_path: Path) -> None:
    environ = {"SAGGAR_REDIS_URL": "redis://env/0", "SAGGAR_MAX_BATCH": "4", "SAGGAR_STORE": "s3://env/x"}
    settings = WorkerSettings.load({"max_batch": 6, "model": None}, environ)
    assert (settings.max_batch, settings.store, settings.model) == (6, "s3://env/x", "saggar/emoji")
    assert settings.jobs.redis_url == "redis://env/0"
    assert WorkerSettings.load({"redis_url": "redis://flag/0"}, environ).jobs.redis_url == "redis://flag/0"


def test_a_model_in_a_folder_goes_by_the_folders_name(tmp_path: Path) -> None:
    (tmp_path / "flux-dev").mkdir()
    settings = WorkerSettings(jobs=JobSettings(), model=str(tmp_path / "flux-dev"))
    assert settings.name == "flux-dev"
    assert WorkerSettings(jobs=JobSettings(), model="saggar/emoji").name == "saggar/emoji"


def test_settings_survive_the_way_to_a_child_and_hide_the_password() -> None:
    settings = WorkerSettings(jobs=JobSettings(redis_url="redis://:secret@h/0"))
    assert WorkerSettings.from_parent({"SAGGAR_WORKER_SETTINGS": settings.handed_on}) == settings
    assert "secret" not in repr(settings)
    with pytest.raises(ConfigError, match=r"^--max-batch: has the wrong type"):
        WorkerSettings.load({"max_batch": "many"}, {})


@pytest.mark.parametrize(
    ("variable", "flag", "wrong", "allowed"),
    [
        ("SAGGAR_LEASE_S", "--lease", "inf", "no NaN, no infinity"),
        ("SAGGAR_LEASE_S", "--lease", "0.00001", ">= 0.1"),
        ("SAGGAR_GRACE_S", "--grace", "1e18", "<= 86400.0"),
        ("SAGGAR_AGE_BOUND_S", "--age-bound-s", "nan", "no NaN, no infinity"),
        ("SAGGAR_WATCHDOG_S", "--watchdog-s", "-1", ">= 0.0"),
        ("SAGGAR_MAX_RESTARTS", "--max-restarts", "9" * 30, "<= 1000000"),
        ("SAGGAR_RANKS", "--ranks", "9" * 30, "<= 4096"),
        ("SAGGAR_SPOOL_LIMIT_BYTES", "--spool-limit-bytes", "9" * 30, "<= 1152921504606846976"),
        ("SAGGAR_INPUTS_MAX_SECONDS", "--inputs-max-seconds", "inf", "no NaN, no infinity"),
        ("SAGGAR_COMPILE", "--compile", "maybe", "true or false"),
        ("SAGGAR_DTYPE", "--dtype", "int8", "'auto', 'float32', 'bfloat16' or 'float16'"),
        ("SAGGAR_NODE_ADDRESS", "--node-address", "host", "host:port"),
    ],
)
def test_a_wrong_setting_is_named_where_it_was_given_with_what_is_allowed(
    variable: str, flag: str, wrong: str, allowed: str
) -> None:
    field = variable.removeprefix("SAGGAR_").lower()
    for flags, environ, name in (({}, {variable: wrong}, variable), ({field: wrong}, {variable: "x"}, flag)):
        with pytest.raises(ConfigError) as caught:
            WorkerSettings.load(flags, environ)
        told = str(caught.value)
        assert told.startswith(f"{name}: ") and told.endswith(f" (allowed: {allowed})")
        assert "\n" not in told


def test_every_number_of_a_worker_has_bounds_that_a_child_can_read_back() -> None:
    for name, value in WorkerSettings(jobs=JobSettings()):
        if type(value) in (int, float):
            for wrong in ("nan", "inf", "1e400", "9" * 40, "-1"):
                with pytest.raises(ConfigError, match=f"^--{name.removesuffix('_s').split('_')[0]}"):
                    WorkerSettings.load({name: wrong}, {})


def test_an_empty_variable_is_not_set() -> None:
    fields = [*WorkerSettings.model_fields, *JobSettings.model_fields]
    empty = {f"SAGGAR_{field.upper()}": "" for field in fields}
    assert WorkerSettings.load({}, empty) == WorkerSettings.load({}, {})
    with pytest.raises(ConfigError, match=r"^--redis: is not a Redis URL"):
        WorkerSettings.load({"redis_url": ""}, {})
    with pytest.raises(ConfigError, match=r"^--store: "):
        WorkerSettings.load({"store": ""}, {})


def test_jobs_and_role_have_no_variable() -> None:
    assert WorkerSettings.load({}, {"SAGGAR_ROLE": "chores", "SAGGAR_JOBS": "{}"}) == WorkerSettings.load(
        {}, {}
    )


def test_settings_of_redis_name_their_variable() -> None:
    with pytest.raises(ConfigError, match=r"^SAGGAR_RECORD_TTL_S: is too large \(allowed: <= 315360000\)$"):
        WorkerSettings.load({}, {"SAGGAR_RECORD_TTL_S": "9" * 30})
    with pytest.raises(ConfigError, match=r"^--redis: is not a Redis URL"):
        WorkerSettings.load({"redis_url": "x"}, {"SAGGAR_REDIS_URL": "redis://h"})
