"""From a card's JSON Schema to a pydantic model that checks a job's params and fills the defaults.

The subset that flat parameter tables need: objects of scalars and lists of scalars, with enum, const,
range, multipleOf, length, pattern, default, anyOf (for "or null") and $ref into $defs. Anything else in a
schema is an InvalidCard when the card is made, never a rule that is silently not applied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Annotated, Any, Literal, Union, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError, create_model
from pydantic_core import SchemaError
from saggar.jobs.errors import InvalidCard, InvalidJob
from saggar.jobs.invalid import one_line
from saggar.jobs.schema import ParamValue

Schema = Mapping[str, JsonValue]

_SCALARS: dict[str, type] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "null": NoneType,
}
_NUMBER_RULES = {
    "minimum": "ge",
    "maximum": "le",
    "exclusiveMinimum": "gt",
    "exclusiveMaximum": "lt",
    "multipleOf": "multiple_of",
}
_RULES: dict[str, dict[str, str]] = {
    "integer": _NUMBER_RULES,
    "number": _NUMBER_RULES,
    "string": {"minLength": "min_length", "maxLength": "max_length", "pattern": "pattern"},
    "array": {"minItems": "min_length", "maxItems": "max_length"},
}
_RULE_WORDS = {word for rules in _RULES.values() for word in rules}
_WORDS = {
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "$comment",
    "format",
    "x-tasks",
    "x-defaults",
    "x-offset",
}
_FORMS = {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "items"}
_OBJECT_WORDS = _WORDS | {"type", "properties", "required", "additionalProperties", "$defs", "$schema", "$id"}
_LIMIT_TEXTS = {
    "minimum": ">= {}",
    "exclusiveMinimum": "> {}",
    "maximum": "<= {}",
    "exclusiveMaximum": "< {}",
    "multipleOf": "a multiple of {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "pattern": "matching {}",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
}
_WORDS_OF = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
}
_CONFIG = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


@dataclass(frozen=True)
class ParamsChecker:
    """A card's rules, built once. `allowed` says for each name what it may be; `defaults` for those that
    have one, `own_defaults` for each task those that are others there; `tasks` for those that are not for every task.
    """

    model: type[BaseModel]
    allowed: dict[str, str]
    defaults: dict[str, ParamValue]
    required: tuple[str, ...]
    tasks: dict[str, list[str]]
    own_defaults: dict[str, dict[str, ParamValue]]

    @classmethod
    def from_schema(cls, schema: Schema) -> ParamsChecker:
        """Raises InvalidCard."""
        properties = schema.get("properties", {})
        if schema.get("type", "object") != "object" or not isinstance(properties, dict):
            raise InvalidCard("params_schema: must describe an object with properties")
        _refuse_unknown(schema, _OBJECT_WORDS, "params_schema")
        rules = cast("dict[str, Schema]", properties)
        definitions = cast("dict[str, Schema]", schema.get("$defs", {}))
        fields: dict[str, Any] = {  # named p0, p1, ...: a parameter may be called "copy" or "json"
            f"p{index}": (_annotation(rule, definitions, name), Field(default=None, alias=name))
            for index, (name, rule) in enumerate(rules.items())
        }
        given = {name: rule["default"] for name, rule in rules.items() if "default" in rule}
        try:
            model = create_model("Params", __config__=_CONFIG, **fields)
            defaults = _checked(model, given)
            own = {task: _checked(model, some) for task, some in _own_defaults(rules).items()}
        except ValidationError as error:
            raise InvalidCard(f"params_schema: default of {one_line(error, {})}") from None
        except (SchemaError, TypeError, ValueError, RuntimeError) as error:  # rules that cannot apply
            raise InvalidCard(f"params_schema: {' '.join(str(error).split())}") from error
        required = tuple(cast("list[str]", schema.get("required", [])))
        allowed = {name: _describe(rule, definitions) for name, rule in rules.items()}
        tasks = {
            name: cast("list[str]", rule["x-tasks"]) for name, rule in rules.items() if "x-tasks" in rule
        }
        return cls(model, allowed, defaults, required, tasks, own)

    def check(self, params: Mapping[str, ParamValue], task: str = "t2i") -> dict[str, ParamValue]:
        """The params with defaults filled, sorted by name. 0, "" and null are values, never "not given".

        Raises InvalidJob naming `params.<name>` and what is allowed.
        """
        try:
            checked = _checked(self.model, params)
        except ValidationError as error:
            line = one_line(error, {"": self.allowed}, root="params")
            name = line.field.removeprefix("params.").partition("[")[0]
            raise InvalidJob(line.field, line.message, self.allowed.get(name, line.allowed)) from None
        defaults = {**self.defaults, **self.own_defaults.get(task, {})}
        filled = {**defaults, **checked}
        for name in self.required:
            if name not in filled:
                raise InvalidJob(f"params.{name}", "is required", self.allowed.get(name, ""))
        for name, meant in self.tasks.items():
            if task not in meant and filled.get(name) != defaults.get(name):
                raise InvalidJob(f"params.{name}", f"says nothing to {task}", f"with {', '.join(meant)}")
        return dict(sorted(filled.items()))


def _checked(model: type[BaseModel], params: Mapping[str, object]) -> dict[str, ParamValue]:
    return model.model_validate(params).model_dump(by_alias=True, exclude_unset=True)


def _own_defaults(rules: Mapping[str, Schema]) -> dict[str, dict[str, object]]:
    """For each task the defaults that are its own, by parameter."""
    found: dict[str, dict[str, object]] = {}
    for name, rule in rules.items():
        own = rule.get("x-defaults", {})
        if not isinstance(own, dict):
            raise InvalidCard(f"params_schema: {name}: x-defaults: write a default for each task")
        for task, value in own.items():
            found.setdefault(task, {})[name] = value
    return found


def _refuse_unknown(rule: Schema, known: set[str], where: str) -> None:
    for word in rule:
        if word not in known:
            raise InvalidCard(f"{where}: {word!r} is not supported")


def _annotation(rule: Schema, definitions: Mapping[str, Schema], name: str) -> Any:
    """The type of one parameter, with its limits."""
    _refuse_unknown(rule, _WORDS | _FORMS | _RULE_WORDS, f"params_schema: {name}")
    if "$ref" in rule:
        target = str(rule["$ref"]).removeprefix("#/$defs/")
        if target not in definitions:
            raise InvalidCard(f"params_schema: {name}: {target!r} is not in $defs")
        return _annotation(definitions[target], definitions, name)
    if "const" in rule or "enum" in rule:
        values = [rule["const"]] if "const" in rule else cast("list[JsonValue]", rule["enum"])
        return Literal[tuple(values)]
    for word in ("anyOf", "oneOf", "allOf"):
        if word in rule:
            branches = cast("list[Schema]", rule[word])
            if _RULE_WORDS & set(rule) or (word == "allOf" and len(branches) > 1):
                raise InvalidCard(f"params_schema: {name}: this use of {word} is not supported")
            return Union[tuple(_annotation(branch, definitions, name) for branch in branches)]  # noqa: UP007
    kinds = rule.get("type")
    names = kinds if isinstance(kinds, list) else [kinds]
    return Union[tuple(_one_type(str(kind), rule, definitions, name) for kind in names)]  # noqa: UP007


def _one_type(kind: str, rule: Schema, definitions: Mapping[str, Schema], name: str) -> Any:
    if kind == "array":
        items = cast("Schema", rule.get("items", {"type": ["string", "number", "boolean", "null"]}))
        base: Any = list[_annotation(items, definitions, name)]  # type: ignore[misc]
    elif kind in _SCALARS:
        base = _SCALARS[kind]
    else:
        raise InvalidCard(f"params_schema: {name}: type {kind!r} is not supported")
    limits: dict[str, Any] = {to: rule[word] for word, to in _RULES.get(kind, {}).items() if word in rule}
    offset = rule.get("x-offset", 0)
    if not offset:
        return Annotated[base, Field(**limits)] if limits else base
    if (
        kind != "integer"
        or not isinstance(offset, int)
        or not isinstance(step := limits.pop("multiple_of", None), int)
    ):
        raise InvalidCard(f"params_schema: {name}: x-offset shifts the multipleOf of an integer")
    return Annotated[base, Field(**limits), AfterValidator(partial(_on_grid, step, offset))]


def _on_grid(step: int, offset: int, value: int) -> int:
    if (value - offset) % step:
        raise ValueError(f"{value} is off the grid")
    return value


def _describe(rule: Schema, definitions: Mapping[str, Schema]) -> str:
    """What a rule allows, in words: "an integer, >= 16, <= 1024, a multiple of 16"."""
    if "$ref" in rule:
        return _describe(definitions[str(rule["$ref"]).removeprefix("#/$defs/")], definitions)
    if "const" in rule or "enum" in rule:
        values = [rule["const"]] if "const" in rule else cast("list[JsonValue]", rule["enum"])
        return ", ".join(json.dumps(value) for value in values)
    for word in ("anyOf", "oneOf", "allOf"):
        if word in rule:
            return " or ".join(_describe(branch, definitions) for branch in cast("list[Schema]", rule[word]))
    kinds = rule.get("type")
    kind = " or ".join(_WORDS_OF.get(str(k), str(k)) for k in (kinds if isinstance(kinds, list) else [kinds]))
    if kinds == "array" and isinstance(rule.get("items"), dict):
        kind += f" of ({_describe(cast('Schema', rule['items']), definitions)})"
    return ", ".join(
        [
            kind,
            *(text.format(rule[word]) for word, text in _LIMIT_TEXTS.items() if word in rule),
            *([f"and {rule['x-offset']} more"] if rule.get("x-offset") else []),
        ]
    )


__all__ = ["ParamsChecker", "Schema"]
