"""From pydantic's errors to one clear line: which field, what is wrong, what is allowed.

Values of strings are never repeated: a prompt put into the wrong field must not reach a log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING

from saggar.jobs.errors import InvalidJob

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

NAME_SHOWN = 64  # characters of a caller's name (a parameter, a model) repeated in a message

_PLAIN = re.compile(rf"[\w.\[\]-]{{1,{NAME_SHOWN}}}", re.ASCII)

_TYPES = {
    "string": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "dict": "an object",
    "model": "an object",
    "model_type": "an object",
    "none_required": "null",
}

# pydantic's error type -> (what is wrong, what is allowed); {x} comes from the error's context
_SENTENCES = {
    "greater_than": ("is too small", "> {gt}"),
    "greater_than_equal": ("is too small", ">= {ge}"),
    "less_than": ("is too large", "< {lt}"),
    "less_than_equal": ("is too large", "<= {le}"),
    "multiple_of": ("is off the grid", "a multiple of {multiple_of}"),
    "string_too_long": ("is too long", "at most {max_length} characters"),
    "string_too_short": ("is too short", "at least {min_length} characters"),
    "too_long": ("has too many items", "at most {max_length}"),
    "too_short": ("has too few items", "at least {min_length}"),
    "string_pattern_mismatch": ("has a form that is not allowed", "{pattern}"),
    "literal_error": ("is not one of the allowed values", "{expected}"),
    "enum": ("is not one of the allowed values", "{expected}"),
    "finite_number": ("must be a finite number", "no NaN, no infinity"),
    "missing": ("is required", ""),
    "timezone_aware": ("needs a time zone", "an ISO 8601 time such as 2030-01-31T12:00:00Z"),
    "string_unicode": ("is not valid Unicode", "text without lone surrogates"),
    "int_from_float": ("must be an integer", "whole numbers"),
}


def field_path(loc: Iterable[int | str], top: str = "job") -> str:
    """`("loras", 0, "scale")` -> `loras[0].scale`; `top` is the name of the whole."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path or top


def shown(name: str) -> str:
    """A caller's name, quoted, on one line and of bounded length."""
    return repr(name if len(name) <= NAME_SHOWN else name[:NAME_SHOWN] + "…")


def unknown_name(field: str, name: str, known: Iterable[str]) -> InvalidJob:
    """The error for a field or parameter that does not exist, with the nearest one that does."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return InvalidJob(field, f"unknown name{hint}", ", ".join(names) or "nothing here")


def one_line(
    error: ValidationError, fields: Mapping[str, Iterable[str]], root: str = "", top: str = "job"
) -> InvalidJob:
    """The first of pydantic's errors as an InvalidJob.

    `fields` maps the path of an object ("" is the top) to the names it may have; `root` is put in
    front of the path; what is wrong with the whole is told of `top`. Unknown names come first: they
    are usually the cause of a missing one.
    """
    details = error.errors(include_url=False, include_input=True)
    detail = next((d for d in details if d["type"] == "extra_forbidden"), details[0])
    loc = tuple(part for part in detail["loc"] if not _is_branch(part))
    path = field_path((root, *loc) if root else loc, top)
    if detail["type"] == "extra_forbidden":
        parent = field_path(p for p in loc[:-1] if isinstance(p, str)) if len(loc) > 1 else ""
        name = str(loc[-1])
        return unknown_name(path if _PLAIN.fullmatch(path) else shown(name), name, fields.get(parent, ()))
    message, allowed = _sentence(detail)
    return InvalidJob(path, message, allowed)


def _is_branch(part: int | str) -> bool:
    """pydantic adds the branch of a union to the path ("int", "constrained-str", "list[...]")."""
    return isinstance(part, str) and (
        part in {"int", "float", "bool", "str", "none"}
        or part.startswith(("constrained-", "list[", "literal["))
    )


def _sentence(detail: ErrorDetails) -> tuple[str, str]:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _SENTENCES:
        message, allowed = _SENTENCES[kind]
        return _with_value(message, detail["input"]), allowed.format(**context)
    if kind in {"value_error", "assertion_error"}:
        return str(context["error"]), ""
    base = kind.removesuffix("_type").removesuffix("_parsing")
    if base in _TYPES:
        return "has the wrong type", _TYPES[base]
    if kind.startswith("datetime"):
        return "is not a time", "an ISO 8601 time such as 2030-01-31T12:00:00Z"
    if kind == "json_invalid":
        return "is not valid JSON", "one JSON object"
    return detail["msg"], ""


def _with_value(message: str, value: object) -> str:
    return f"{value} {message}" if isinstance(value, int | float) and abs(value) < 1e30 else message
