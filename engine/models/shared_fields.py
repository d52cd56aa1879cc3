"""The fields of a request that every family shares, as opposed to its parameters: what they may hold. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from saggar.engine.errors import InvalidRequest
from saggar.engine.params import PLAIN, as_plain, is_text, shown
from saggar.engine.request import SEED_MAX, Request

LIMITS = {"max_prompt_chars": 20_000, "max_outputs": 64}
"""What holds for every model whose saggar.json says nothing else."""
_SCALARS = (
    "id",
    "prompt",
    "negative_prompt",
    "task",
    "seed",
    "num_outputs",
    "priority",
    "preview_every",
    "deadline_s",
)


def check_common(request: Request, limits: Mapping[str, int]) -> None:
    """The fields that every family shares. InvalidRequest names the first wrong one."""
    if not request.id or not isinstance(request.id, str):
        raise InvalidRequest("id", "must be a text that is not empty")
    for field in ("params", "inputs"):
        if not isinstance(value := getattr(request, field), Mapping):
            raise InvalidRequest(field, f"{type(value).__name__} was given", "a mapping of names to values")
    if not isinstance(request.suspect, bool):
        raise InvalidRequest("suspect", f"{shown(request.suspect)} was given", "true or false")
    _check_text("prompt", request.prompt, limits["max_prompt_chars"])
    if request.negative_prompt is not None:
        _check_text("negative_prompt", request.negative_prompt, limits["max_prompt_chars"])
    _check_int("num_outputs", request.num_outputs, 1, limits["max_outputs"])
    _check_int("seed", request.seed, 0, SEED_MAX - request.num_outputs + 1)
    _check_int("priority", request.priority, 0, 2)
    _check_int("preview_every", request.preview_every, 0, 1_000_000)
    deadline = request.deadline_s
    if deadline is not None and not (isinstance(deadline, int | float) and deadline >= 0):
        raise InvalidRequest("deadline_s", f"{shown(deadline)} is not a time from now", "0 or more seconds")


def in_plain_words(request: Request) -> Request:
    """Its scalars of Python's own classes."""
    found = ((name, getattr(request, name)) for name in _SCALARS)
    changed = {name: as_plain(value) for name, value in found if type(value) not in PLAIN}
    return replace(request, **changed) if changed else request  # type: ignore[arg-type]


def _check_text(field: str, value: object, longest: int) -> None:
    if not isinstance(value, str):
        raise InvalidRequest(field, f"{type(value).__name__} is not a text", "text")
    if len(value) > longest:
        raise InvalidRequest(field, f"{len(value)} characters are too many", f"at most {longest} characters")
    if not is_text(value):
        raise InvalidRequest(field, "is not valid Unicode", "text without lone surrogates")


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(field, f"{shown(value)} is out of range", f"integer, {low} to {high}")
