"""Which attention kernel each role gets, as a configuration says it. No torch: what it names is checked at start.

Written as `self=cudnn,cross=torch_sdpa`; a kernel's own options follow it: `self=sage:smooth_k=false`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from saggar.engine.errors import Unsupported

ROLES: Mapping[str, str] = MappingProxyType(
    {"self": "self", "joint": "self", "refiner": "self", "cross": "cross", "image_cross": "cross"}
)
"""Each role of an attention site and its category, whose choice a role has that has none of its own.

joint: text and picture attend to both in one sequence. refiner: layers before the streams meet.
"""
DEFAULT = "default"
AUTO = "auto"
"""Not a kernel: the fastest of them for each shape, found by trying while the engine starts."""
OptionValue: TypeAlias = bool | int | float | str


@dataclass(frozen=True)
class Choice:
    """A kernel by name, and its options."""

    backend: str
    options: Mapping[str, OptionValue] = field(default_factory=dict)


def parse_attention(text: str) -> dict[str, Choice]:
    """Choices by role. Unsupported: not of that form, or no role."""
    choices: dict[str, Choice] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        role, equals, wish = part.partition("=")
        if not equals or not wish:
            raise Unsupported(f"attention: {part!r} is not ROLE=KERNEL or ROLE=KERNEL:OPTION=VALUE")
        backend, *options = wish.split(":")
        choices[role.strip()] = Choice(backend.strip(), dict(map(_option, options)))
    return checked(choices)


def checked(choices: Mapping[str, Choice | str]) -> dict[str, Choice]:
    """The same with kernels that have no options given by their names. Unsupported: no such role."""
    allowed = sorted({*ROLES, *ROLES.values(), DEFAULT})
    for role in choices:
        if role not in allowed:
            raise Unsupported(f"attention: {role!r} is no role; there are {', '.join(allowed)}")
    found = {role: Choice(wish) if isinstance(wish, str) else wish for role, wish in choices.items()}
    for role, choice in found.items():
        if choice.backend == AUTO and choice.options:
            raise Unsupported(f"attention {role}: auto has no options, not {', '.join(choice.options)}")
    return found


def wish_of(role: str, choices: Mapping[str, Choice]) -> Choice | None:
    """The choice for a role: its own, its category's, the default; None: the platform decides."""
    for name in (role, ROLES[role], DEFAULT):
        if name in choices:
            return choices[name]
    return None


def _option(text: str) -> tuple[str, OptionValue]:
    name, equals, value = text.partition("=")
    if not equals:
        raise Unsupported(f"attention: option {text!r} is not NAME=VALUE")
    words: dict[str, OptionValue] = {"true": True, "false": False}
    if value in words:
        return name, words[value]
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value
