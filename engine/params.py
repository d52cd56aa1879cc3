"""A family's parameters as a flat JSON Schema: derived from its data class, narrowed by the checkpoint,
checked here.

Known words: type, minimum, maximum, exclusiveMinimum, exclusiveMaximum, multipleOf, x-offset (how far the grid of
multipleOf is shifted: 1 for frames that are one more than a multiple), enum, const, items, minItems,
maxItems, default, description, anyOf (for "or null"), x-tasks: the tasks that a parameter is for, and x-defaults: the
defaults of tasks that have others. Any other is refused when the schema is made, never a rule that is silently not
applied. Parameters are scalars or lists of scalars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from pydantic import TypeAdapter
from saggar.engine.errors import InvalidRequest, LoadError
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
_NOTES = {"title", "description", "default", "x-tasks", "x-defaults"}
_RANGE = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "x-offset"}
_RULES: dict[str, set[str]] = {
    "integer": _RANGE,
    "number": _RANGE,
    "array": {"items", "minItems", "maxItems"},
}
_SCALAR: dict[str, JsonValue] = {
    "anyOf": [{"type": kind} for kind in ("string", "number", "boolean", "null")]
}
_LONGEST_SHOWN = 40
_SAID = {
    "exclusiveMinimum": "above {}",
    "exclusiveMaximum": "below {}",
    "multipleOf": "multiple of {}",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
}


def or_null(**defaults: ParamValue) -> Callable[[dict[str, Any]], None]:
    """For `json_schema_extra`: null is a value too, for which the family puts one in before it builds its parameters;
    `defaults` are those of tasks that have another.
    """

    def extend(schema: dict[str, Any]) -> None:
        rules = {word: schema.pop(word) for word in [*schema] if word not in _NOTES}
        schema["anyOf"] = [rules, {"type": "null"}]
        if defaults:
            schema["x-defaults"] = defaults

    return extend


def schema_of(params: type, *narrowings: Narrowing, settings: Narrowing = MappingProxyType({})) -> JsonSchema:
    """JSON Schema of the data class `params` with narrowings applied in order, `settings` last: a default of those is
    meant for every task. Rules of a field that may be null are for what is not.

    KeyError: an unknown field. LoadError as in `check_schema`.
    """
    schema = cast(JsonSchema, TypeAdapter(params).json_schema())
    properties = _properties(schema)
    for name, words in (item for narrowing in (*narrowings, settings) for item in narrowing.items()):
        if name not in properties:
            raise KeyError(f"no parameter {name!r}: there are {', '.join(properties)}")
        _narrow(properties[name], words)
    for name, words in settings.items():
        if "default" in words and "x-defaults" not in words:
            properties[name].pop("x-defaults", None)
    for words in properties.values():
        words.pop("title", None)
    schema["additionalProperties"] = False
    schema.pop("description", None)
    check_schema(schema)
    return schema


def _narrow(own: dict[str, JsonValue], words: Mapping[str, JsonValue]) -> None:
    if "anyOf" not in own or "anyOf" in words:
        own.update(words)
        return
    own.update({word: value for word, value in words.items() if word in _NOTES})
    for option in _options(own):
        if option.get("type") != "null":
            option.update({word: value for word, value in words.items() if word not in _NOTES})


def check_schema(schema: JsonSchema) -> None:
    """LoadError: a word that is not applied here, or a choice or a default that the other words refuse."""
    for name, words in _properties(schema).items():
        _check_words(name, words)
        defaults = [words["default"]] if "default" in words else []
        for default in (*defaults, *cast("dict[str, JsonValue]", words.get("x-defaults", {})).values()):
            if problem := _refusal(cast(ParamValue, default), words):
                raise LoadError(f"parameter {name}: its default {problem}")


def check_params(
    params: Mapping[str, ParamValue], schema: JsonSchema, task: str = "t2i"
) -> dict[str, ParamValue]:
    """All parameters, defaults filled in. InvalidRequest names the first field that is wrong, or that says nothing to
    this task and is not left at its default.
    """
    properties = _properties(schema)
    for name in params:
        if name not in properties:
            plain = isinstance(name, str) and name.isidentifier() and len(name) <= _LONGEST_SHOWN
            raise InvalidRequest(
                f"params.{name if plain else shown(name)}",
                "is not a parameter of this model",
                ", ".join(properties),
            )
    required = cast("list[str]", schema.get("required", []))
    for name in required:
        if name not in params:
            raise InvalidRequest(f"params.{name}", "is required", describe(properties[name]))
    filled: dict[str, ParamValue] = {}
    for name, words in properties.items():
        default = default_of(words, task)
        value = params.get(name, default)
        left = isinstance(value, _SCALARS) and type(value) is type(default) and value == default
        # A default was checked with the schema.
        if name in params and not left and (problem := _refusal(value, words)):
            raise InvalidRequest(f"params.{name}", problem, describe(words))
        meant = cast("list[str]", words.get("x-tasks", [task]))
        if task not in meant and value != default:
            raise InvalidRequest(f"params.{name}", f"says nothing to {task}", f"with {', '.join(meant)}")
        filled[name] = value if type(value) in PLAIN else as_plain(value)
    return filled


def as_plain(value: ParamValue) -> ParamValue:
    """The same of Python's own classes: those of a caller's script, such as an enumeration's, are not known where the
    ranks are.
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list | tuple):
        return cast("list[str]", [as_plain(one) for one in value])
    return int(value) if isinstance(value, int) else float(cast(float, value))


def default_of(words: Mapping[str, JsonValue], task: str) -> ParamValue:
    """A parameter's default for a task; None where it has none."""
    own = cast("dict[str, ParamValue]", words.get("x-defaults", {}))
    return own.get(task, cast(ParamValue, words.get("default")))


def is_text(value: str) -> bool:
    """Whether it can be written at all: a lone surrogate cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def describe(words: Mapping[str, JsonValue]) -> str:
    """What a field allows, in words: `integer, 16 to 2048, multiple of 16`."""
    if "anyOf" in words:
        return " or ".join(describe(option) for option in _options(words))
    if (choices := _choices(words)) is not None:
        return ", ".join(str(value) for value in choices)
    said = [str(words.get("type", "any value"))]
    low, high = words.get("minimum"), words.get("maximum")
    if low is not None and high is not None:
        said.append(f"{low} to {high}")
    elif low is not None:
        said.append(f"at least {low}")
    elif high is not None:
        said.append(f"at most {high}")
    if isinstance(items := words.get("items"), dict):
        said.append(f"each {describe(items)}")
    said += [text.format(words[word]) for word, text in _SAID.items() if word in words]
    if words.get("x-offset"):
        said.append(f"and {words['x-offset']} more")
    return ", ".join(said)


def shown(value: object) -> str:
    """A refused value for an error: a long one may be a prompt, which no error repeats."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"a {type(value).__name__} of {len(text)} characters"


def _check_words(name: str, words: Mapping[str, JsonValue]) -> None:
    kind, choices = words.get("type"), _choices(words)
    known = {"anyOf"} if "anyOf" in words else {"type", "enum", "const"} | _RULES.get(str(kind), set())
    unknown = sorted(words.keys() - known - _NOTES)
    if unknown:
        raise LoadError(f"parameter {name}: the schema word {unknown[0]!r} is not supported here")
    if "anyOf" in words:
        for option in _options(words):
            _check_words(name, option)
    elif not (isinstance(kind, str) and kind in _TYPES) and (kind is not None or choices is None):
        raise LoadError(f"parameter {name}: the type {kind!r} is not supported")
    elif isinstance(words.get("items"), dict):
        _check_words(name, cast("dict[str, JsonValue]", words["items"]))
    for choice in choices or ():
        if problem := _problem(cast(ParamValue, choice), words):
            raise LoadError(f"parameter {name}: its choice {problem}")


def _refusal(value: ParamValue, words: Mapping[str, JsonValue]) -> str | None:
    """Why no option of the words takes the value, None if one does."""
    problems = [_problem(value, option) for option in _options(words)]
    return str(problems[0]) if all(problems) else None


def _options(words: Mapping[str, JsonValue]) -> list[dict[str, JsonValue]]:
    return cast("list[dict[str, JsonValue]]", words["anyOf"]) if "anyOf" in words else [dict(words)]


def _choices(words: Mapping[str, JsonValue]) -> list[JsonValue] | None:
    return [words["const"]] if "const" in words else cast("list[JsonValue] | None", words.get("enum"))


def _problem(value: ParamValue, words: Mapping[str, JsonValue]) -> str | None:
    """Why the value does not meet the words, None if it does."""
    kind = str(words.get("type", ""))
    is_bool_for_number = isinstance(value, bool) and kind in ("integer", "number")
    if kind and (is_bool_for_number or not isinstance(value, _TYPES[kind])):
        return f"{shown(value)} is not of type {kind}"
    choices = _choices(words)
    if choices is not None and value not in choices:
        return f"{shown(value)} is not a choice"
    if isinstance(value, str) and not is_text(value):
        return "is not valid Unicode"
    if isinstance(value, list | tuple):
        return _items_problem(value, words)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number_problem(value, words)
    return None


def _items_problem(values: Sequence[int | float | str], words: Mapping[str, JsonValue]) -> str | None:
    if not cast(int, words.get("minItems", 0)) <= len(values) <= cast(float, words.get("maxItems", math.inf)):
        return f"has {len(values)} items"
    rule = cast("dict[str, JsonValue]", words.get("items", _SCALAR))
    return next((problem for value in values if (problem := _refusal(value, rule))), None)


def _number_problem(value: float, words: Mapping[str, JsonValue]) -> str | None:
    if words.get("type") != "integer" and not _is_finite(value):
        return f"{shown(value)} is not a finite number"
    bounds = {name: cast(float, words[name]) for name in words if name in _BOUNDS}
    for name, bound in bounds.items():
        if not _BOUNDS[name](value, bound):
            return f"{shown(value)} is out of range"
    offset = cast(float, words.get("x-offset", 0))
    if "multipleOf" in words and not _is_multiple(value - offset, cast(float, words["multipleOf"])):
        return f"{shown(value)} is off the grid"
    return None


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _is_multiple(value: float, step: float) -> bool:
    """0.3 is a multiple of 0.1, though its binary form is not: within a billionth, as pydantic has it."""
    rest = value % step
    if isinstance(rest, int):
        return rest == 0
    tolerance = abs(value) / 1e9
    return rest <= tolerance or abs(rest - step) <= tolerance


_SCALARS = (str, int, float)
PLAIN = frozenset({bool, int, float, str, type(None)})
_BOUNDS = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}


def _properties(schema: JsonSchema) -> dict[str, dict[str, JsonValue]]:
    return cast("dict[str, dict[str, JsonValue]]", schema.get("properties", {}))
