"""Parameters against a flat JSON Schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from pydantic.dataclasses import dataclass
from saggar.engine import InvalidRequest, LoadError
from saggar.engine.params import check_params, or_null, schema_of


@dataclass(frozen=True)
class Params:
    size: Annotated[int, Field(ge=16, le=64, multiple_of=8)]
    scale: Annotated[float, Field(gt=0, lt=2)] = 1.0
    kind: Literal["a", "b"] = "a"
    shift: Annotated[float, Field(ge=0)] | None = None
    on: bool = False
    text: str = "x"
    layers: list[int] | None = None


SCHEMA = schema_of(Params, {})


def test_defaults_are_filled_in_and_zero_is_a_value() -> None:
    assert check_params({"size": 16, "shift": 0.0}, SCHEMA) == {
        "size": 16, "scale": 1.0, "kind": "a", "shift": 0.0, "on": False, "text": "x", "layers": None,
    }  # fmt: skip
    assert check_params({"size": 64, "scale": 1, "text": "", "layers": [1]}, SCHEMA)["text"] == ""
    assert check_params({"size": 64, "shift": None}, SCHEMA)["shift"] is None


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("size", 8, "integer, 16 to 64, multiple of 8"),
        ("size", 72, "integer, 16 to 64, multiple of 8"),
        ("size", 20, "integer, 16 to 64, multiple of 8"),
        ("size", 16.0, "integer, 16 to 64, multiple of 8"),
        ("size", True, "integer, 16 to 64, multiple of 8"),
        ("size", None, "integer, 16 to 64, multiple of 8"),
        ("scale", 0, "number, above 0, below 2"),
        ("scale", 2.0, "number, above 0, below 2"),
        ("scale", float("nan"), "number, above 0, below 2"),
        ("scale", "1", "number, above 0, below 2"),
        ("kind", "c", "a, b"),
        ("kind", 1, "a, b"),
        ("shift", -1.0, "number, at least 0 or null"),
        ("on", 1, "boolean"),
        ("text", 5, "string"),
        ("layers", "1", "array, each integer or null"),
        ("other", 1, "size, scale, kind, shift, on, text, layers"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_params({"size": 16, name: value}, SCHEMA)
    assert (caught.value.field, caught.value.allowed) == (f"params.{name}", allowed)


def test_a_long_value_is_not_repeated_for_it_may_be_a_prompt() -> None:
    secret = "a portrait of somebody who would not like to be named"
    for name in ("layers", "kind", "size"):
        with pytest.raises(InvalidRequest) as caught:
            check_params({"size": 16, name: secret}, SCHEMA)
        assert secret not in str(caught.value)
        assert f"a str of {len(secret) + 2} characters" in str(caught.value)


def test_what_is_required_must_be_there() -> None:
    with pytest.raises(InvalidRequest, match=r"params\.size: is required"):
        check_params({}, SCHEMA)


def test_later_narrowings_win() -> None:
    schema = schema_of(Params, {"size": {"maximum": 48, "default": 32}}, {"size": {"default": 40}})
    assert check_params({"size": 48}, schema)["size"] == 48
    properties: Any = schema["properties"]
    assert (properties["size"]["default"], properties["size"]["maximum"]) == (40, 48)
    with pytest.raises(KeyError, match="no parameter 'colour'"):
        schema_of(Params, {"colour": {"default": 1}})


def test_a_narrowing_that_would_not_be_applied_is_refused() -> None:
    for name, words, complaint in (
        ("text", {"minLength": 2}, "the schema word 'minLength' is not supported"),
        ("shift", {"maxItems": 5}, "the schema word 'maxItems' is not supported"),
        ("size", {"default": 17}, "its default 17 is off the grid"),
        ("size", {"enum": [16, 24, 72]}, "its choice 72 is out of range"),
    ):
        with pytest.raises(LoadError, match=f"parameter {name}: {complaint}"):
            schema_of(Params, {name: words})


def test_what_may_be_null_is_narrowed_where_it_is_not() -> None:
    @dataclass
    class Sided:
        side: Annotated[int, Field(ge=1, json_schema_extra=or_null(edit=None))] = 8

    assert check_params({}, schema_of(Sided), "edit") == {"side": None}
    schema = schema_of(Sided, {"side": {"default": 16, "multipleOf": 16}})
    assert (check_params({}, schema), check_params({}, schema, "edit")) == ({"side": 16}, {"side": None})
    assert check_params({"side": None}, schema) == {"side": None}
    with pytest.raises(InvalidRequest, match=r"side: 8 is off the grid .*multiple of 16 or null"):
        check_params({"side": 8}, schema)
    settings = schema_of(Sided, settings={"side": {"default": 4, "maximum": 4}})
    assert check_params({}, settings, "edit") == {"side": 4}
    with pytest.raises(InvalidRequest, match="side: 8 is out of range"):
        check_params({"side": 8}, settings)


def test_lists_may_have_a_length() -> None:
    pair = {"type": "array", "minItems": 2, "maxItems": 2}
    schema = schema_of(Params, {"layers": {"anyOf": [pair, {"type": "null"}]}})
    assert check_params({"size": 16, "layers": [1, 2]}, schema)["layers"] == [1, 2]
    for layers in ([1], [1, 2, 3]):
        with pytest.raises(
            InvalidRequest, match=r"params\.layers: has . items.*at least 2 items, at most 2 items"
        ):
            check_params({"size": 16, "layers": layers}, schema)


def test_items_of_lists_are_checked() -> None:
    for layers in (["a"], [1, None], [1.5]):
        with pytest.raises(InvalidRequest, match=r"params\.layers"):
            check_params({"size": 16, "layers": layers}, SCHEMA)


def test_an_error_is_one_short_line_that_says_what_is_allowed() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_params({"size": "x" * 10_000}, SCHEMA)
    assert len(str(caught.value)) < 300
    with pytest.raises(InvalidRequest, match=r"params\.'a\\nb': is not a parameter"):
        check_params({"size": 16, "a\nb": 1}, SCHEMA)
    with pytest.raises(InvalidRequest, match=r"params\.text: is not valid Unicode"):
        check_params({"size": 16, "text": "\ud800"}, SCHEMA)
    pair = {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 2}
    schema = schema_of(Params, {"layers": {"anyOf": [pair, {"type": "null"}]}})
    with pytest.raises(InvalidRequest, match=r"array, each integer, at most 9, at most 2 items"):
        check_params({"size": 16, "layers": [10**400]}, schema)


def test_a_grid_may_be_shifted() -> None:
    schema: Any = {
        "properties": {
            "frames": {"type": "integer", "default": 5, "minimum": 1, "multipleOf": 4, "x-offset": 1}
        }
    }
    for frames in (1, 5, 81):
        assert check_params({"frames": frames}, schema) == {"frames": frames}
    with pytest.raises(InvalidRequest, match=r"frames: 6 is off the grid .*multiple of 4, and 1 more"):
        check_params({"frames": 6}, schema)
