"""The call of a pipeline in diffusers, read from the library's source: neither diffusers nor torch is imported."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_CLASS = re.compile(r"^class (\w+Pipeline)\(", re.MULTILINE)
_SCALARS = {"int", "float", "bool", "str"}


@dataclass(frozen=True)
class Argument:
    """One argument of `__call__`. `kinds` are the members of its annotation's union as they are written; `default`
    counts unless it is `required` or `computed`, which is no literal.
    """

    name: str
    kinds: frozenset[str]
    default: object = None
    required: bool = False
    computed: bool = False

    @property
    def scalar(self) -> str | None:
        """The one of int, float, bool, str that it takes, None where it takes anything else or several."""
        kinds = self.kinds - {"None"}
        if not kinds and self.default is not None:
            kinds = frozenset({type(self.default).__name__})
        found = next(iter(kinds)) if len(kinds) == 1 else None
        return found if found in _SCALARS and not self.computed else None

    @property
    def nullable(self) -> bool:
        """None is among what it takes."""
        return "None" in self.kinds or (self.default is None and not self.required)

    def takes_list(self, of: str) -> bool:
        """It takes a list of these too."""
        return any(kind.lower() == f"list[{of.lower()}]" for kind in self.kinds)


def call_arguments(class_name: str) -> Mapping[str, Argument] | None:
    """The arguments of a pipeline's `__call__` by name, inherited ones too; None: diffusers has no such pipeline."""
    return _arguments(class_name, frozenset())


@cache
def _sources() -> Mapping[str, Path]:
    """The file of each pipeline class."""
    spec = importlib.util.find_spec("diffusers")
    if spec is None or spec.origin is None:
        return {}
    folder = Path(spec.origin).parent / "pipelines"
    return {
        name: path
        for path in sorted(folder.rglob("*.py"))
        for name in _CLASS.findall(path.read_text(encoding="utf-8"))
    }


@cache
def _arguments(class_name: str, seen: frozenset[str]) -> Mapping[str, Argument] | None:
    path = _sources().get(class_name)
    if path is None or class_name in seen:
        return None
    tree = ast.parse(path.read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    for node in body.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__call__":
            return {argument.name: argument for argument in _read(node.args)}
    bases = [base.id for base in body.bases if isinstance(base, ast.Name)]
    found = (_arguments(base, seen | {class_name}) for base in bases)
    return next((arguments for arguments in found if arguments is not None), None)


def _read(arguments: ast.arguments) -> Iterator[Argument]:
    positional = [*arguments.posonlyargs, *arguments.args][1:]
    padding: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults = [*padding, *arguments.defaults, *arguments.kw_defaults]
    for argument, default in zip([*positional, *arguments.kwonlyargs], defaults, strict=True):
        kinds = frozenset(_members(argument.annotation)) if argument.annotation else frozenset[str]()
        if default is None:
            yield Argument(argument.arg, kinds, required=True)
            continue
        try:
            yield Argument(argument.arg, kinds, ast.literal_eval(default))
        except ValueError:
            yield Argument(argument.arg, kinds, computed=True)


def _members(annotation: ast.expr) -> Iterator[str]:
    """The members of a union, in either spelling."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        yield from (*_members(annotation.left), *_members(annotation.right))
    elif isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("Optional", "Union"):
        inner = annotation.slice
        for member in inner.elts if isinstance(inner, ast.Tuple) else [inner]:
            yield from _members(member)
        if ast.unparse(annotation.value) == "Optional":
            yield "None"
    else:
        yield ast.unparse(annotation)
