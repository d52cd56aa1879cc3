"""What a run's flags say: settings, seeds, matrices."""

from __future__ import annotations

import pytest
from saggar.jobs.errors import ConfigError
from saggar.jobs.runs.plan import parse_matrix, parse_seeds, parse_settings


def test_settings_are_json_where_they_can_be() -> None:
    assert parse_settings(["steps=4", "scale=2.5", "key=a=b", "flag=true", "zero=0", "empty="]) == {
        "steps": 4,
        "scale": 2.5,
        "key": "a=b",
        "flag": True,
        "zero": 0,
        "empty": "",
    }
    with pytest.raises(ConfigError, match="name=value"):
        parse_settings(["steps"])


def test_seeds_and_matrices_as_they_are_written() -> None:
    assert parse_seeds("0..2") == (0, 1, 2)
    assert parse_seeds("5") == (5,)
    assert parse_seeds(None) == ()
    assert parse_matrix(["a=1,x,true"]) == (("a", (1, "x", True)),)
