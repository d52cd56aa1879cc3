"""Which files of a model folder are needed, from their names alone: configurations, tokenizers, safetensors.

A pickle (`.bin`, `.pt`, `.ckpt`) is never among them. Of weights that exist in several precisions the plain
files are taken, and a variant such as `fp16` only where there is nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from saggar.engine.errors import LoadError
from saggar.engine.request import JsonValue

INDEX = "model_index.json"
SETTINGS = "saggar.json"
WEIGHTS = ".safetensors"
AGAIN = "copy or fetch it again"
SMALL = (".json", ".txt", ".model", ".jinja")
"""Configurations and what tokenizers are made of."""

_WEIGHTS_NAME = re.compile(
    r"(?P<base>[^.]+?)(\.(?P<variant>\w+))?(-\d{5}-of-\d{5})?(\.(?P<behind>\w+))?\.safetensors"
)
_USUAL = {"model", "diffusion_pytorch_model"}
_VARIANTS = ("bf16", "fp16", "fp32")


def needed(index: Mapping[str, JsonValue], names: Iterable[str]) -> list[str]:
    """Of all names in a folder those that its pipeline is loaded from; `index` is model_index.json's content.

    Files beside the components' folders are needed where a text in the index names them, by pattern if
    need be: models that are not diffusers' say so where their weights are.
    """
    present = sorted(names)
    components = {name for name, value in index.items() if isinstance(value, list) and value != [None, None]}
    patterns = [INDEX, SETTINGS, *_texts(index.values())]
    chosen = [
        name
        for name in present
        if name.endswith((*SMALL, WEIGHTS)) and any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    for component in sorted(components):
        inside = [name for name in present if name.rpartition("/")[0] == component]
        weights = set(choose_weights(name.rpartition("/")[2] for name in inside)[1])
        chosen += [name for name in inside if name.endswith(SMALL) or name.rpartition("/")[2] in weights]
    return sorted(set(chosen))


def choose_weights(names: Iterable[str]) -> tuple[str | None, list[str]]:
    """The variant to load of one component, None for the plain one, and its files among `names`."""
    found: dict[str | None, list[str]] = {}
    for name in sorted(names):
        if match := _WEIGHTS_NAME.fullmatch(name):
            found.setdefault(match["variant"] or match["behind"], []).append(name)
    if not found:
        return None, []
    order = [None, *_VARIANTS, *sorted(variant for variant in found if variant)]
    variant = next(variant for variant in order if variant in found)
    usual = [name for name in found[variant] if re.split(r"[.-]", name)[0] in _USUAL]
    return variant, usual or found[variant]


def json_object(text: str | bytes, where: object) -> dict[str, JsonValue]:
    """The JSON object in a file's content. LoadError names `where` it came from."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{where}: {error}: {AGAIN}") from error
    if not isinstance(content, dict):
        raise LoadError(f"{where}: not a JSON object")
    return content


def _texts(values: Iterable[JsonValue]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list) and len(value) != 2:
            yield from _texts(value)
        elif isinstance(value, dict):
            yield from _texts(value.values())
