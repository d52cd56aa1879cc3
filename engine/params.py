"""A family's parameters as a flat JSON Schema: derived from its data class, narrowed by the checkpoint,
checked here.

Known words: type, minimum, maximum, exclusiveMinimum, exclusiveMaximum, multipleOf, enum, default,
description, and anyOf with null. It knows nothing of nesting: parameters are scalars or lists of scalars.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

from pydantic import TypeAdapter
from saggar.engine.errors import InvalidRequest
from saggar.engine.request import JsonSchema, JsonValue, ParamValue

Narrowing = Mapping[str, Mapping[str, JsonValue]]
"""For a field: schema words that replace the data class's own, e.g. {"height": {"multipleOf": 16}}."""

_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "array": (list, tuple),
    "null": (type(None),),
}


def schema_of(params: type, *narrowings: Narrowing) -> JsonSchema:
    """JSON Schema of the data class `params` with narrowings applied in order. KeyError: an unknown field."""
    schema = cast(JsonSchema, TypeAdapter(params).json_schema())
    properties = _properties(schema)
    for name, words in (item for narrowing in narrowings for item in narrowing.items()):
        if name not in properties:
            raise KeyError(f"no parameter {name!r}: there are {', '.join(properties)}")
        properties[name].update(words)
    for words in properties.values():
        words.pop("title", None)
    schema["additionalProperties"] = False
    schema.pop("description", None)
    return schema


def check_params(params: Mapping[str, ParamValue], schema: JsonSchema) -> dict[str, ParamValue]:
    """All parameters, defaults filled in. InvalidRequest names the first field that is wrong."""
    properties = _properties(schema)
    for name in params:
        if name not in properties:
            raise InvalidRequest(f"params.{name}", "is not a parameter of this model", ", ".join(properties))
    required = cast("list[str]", schema.get("required", []))
    for name in required:
        if name not in params:
            raise InvalidRequest(f"params.{name}", "is required", describe(properties[name]))
    filled: dict[str, ParamValue] = {}
    for name, words in properties.items():
        value = params.get(name, cast(ParamValue, words.get("default")))
        if name in params:
            _check_value(name, value, words)
        filled[name] = value
    return filled


def describe(words: Mapping[str, JsonValue]) -> str:
    """What a field allows, in words: `integer, 16 to 2048, multiple of 16`."""
    if "anyOf" in words:
        return " or ".join(describe(option) for option in _options(words))
    if "enum" in words:
        return ", ".join(str(value) for value in cast("list[JsonValue]", words["enum"]))
    said = [str(words.get("type", "any value"))]
    low, high = words.get("minimum"), words.get("maximum")
    if low is not None and high is not None:
        said.append(f"{low} to {high}")
    elif low is not None:
        said.append(f"at least {low}")
    elif high is not None:
        said.append(f"at most {high}")
    for word, text in (
        ("exclusiveMinimum", "above"),
        ("exclusiveMaximum", "below"),
        ("multipleOf", "multiple of"),
    ):
        if word in words:
            said.append(f"{text} {words[word]}")
    return ", ".join(said)


def _check_value(name: str, value: ParamValue, words: Mapping[str, JsonValue]) -> None:
    options = _options(words)
    problems = [_problem(value, option) for option in options]
    if all(problems):
        raise InvalidRequest(f"params.{name}", str(problems[0]), describe(words))


def _options(words: Mapping[str, JsonValue]) -> list[dict[str, JsonValue]]:
    return cast("list[dict[str, JsonValue]]", words["anyOf"]) if "anyOf" in words else [dict(words)]


def _problem(value: ParamValue, words: Mapping[str, JsonValue]) -> str | None:
    """Why the value does not meet the words, None if it does."""
    kind = str(words.get("type", ""))
    is_bool_for_number = isinstance(value, bool) and kind in ("integer", "number")
    if kind and (is_bool_for_number or not isinstance(value, _TYPES[kind])):
        return f"{value!r} is not of type {kind}"
    if "enum" in words and value not in cast("list[JsonValue]", words["enum"]):
        return f"{value!r} is not a choice"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number_problem(value, words)
    return None


def _number_problem(value: float, words: Mapping[str, JsonValue]) -> str | None:
    if not math.isfinite(value):
        return f"{value!r} is not a finite number"
    bounds = {name: cast(float, words[name]) for name in words if name in _BOUNDS}
    for name, bound in bounds.items():
        if not _BOUNDS[name](value, bound):
            return f"{value!r} is out of range"
    if "multipleOf" in words and value % cast(float, words["multipleOf"]) != 0:
        return f"{value!r} is off the grid"
    return None


_BOUNDS = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}


def _properties(schema: JsonSchema) -> dict[str, dict[str, JsonValue]]:
    return cast("dict[str, dict[str, JsonValue]]", schema.get("properties", {}))
