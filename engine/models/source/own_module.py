"""A torch module that no library loads, filled from safetensors files with names of their own. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from saggar.engine.errors import LoadError
from saggar.engine.models.source.weights import read_header
from saggar.engine.platform.base import Placement

M = TypeVar("M", bound=torch.nn.Module)
Rename = Callable[[str], str | None]
"""What a tensor's name in a file is in the module; None: it is not for this module."""
_TOLD = 2


def load_own(make: Callable[[], M], sources: Mapping[Path, Rename], placement: Placement) -> M:
    """The module that `make` builds, on the rank's device, without gradients; its weights are those of `sources`.

    It is built without memory, and each tensor is read straight to the device: floats in the placement's dtype, others
    as they are. All headers are looked at before any weight is read. LoadError: a file is missing or damaged; a tensor
    is missing, unknown, of another shape, of whole numbers where floats belong, or in two files. Buffers must be in the
    files too: one that is computed in the constructor and not saved (`persistent=False`) is refused, for it would have
    no values.
    """
    with torch.device("meta"):
        module = make()
    wanted = module.state_dict()
    shapes = {name: tuple(value.shape) for name, value in wanted.items()}
    floats = {name for name, value in wanted.items() if value.is_floating_point()}
    names = {path: _names(path, rename, shapes, floats) for path, rename in sources.items()}
    whole = ", ".join(str(path) for path in sources)
    _refuse(whole, [f"{name} is missing" for name in sorted(shapes.keys() - _once(names))])
    computed = [name for name, _ in module.named_buffers() if name not in shapes]
    _refuse(whole, [f"{name} is computed, not loaded: register it as persistent" for name in computed])
    weights = {ours: value for path in names for ours, value in _read(path, names[path], placement).items()}
    module.load_state_dict(weights, assign=True)
    return module.requires_grad_(False).eval()


def _names(
    path: Path, rename: Rename, shapes: Mapping[str, tuple[int, ...]], floats: Container[str]
) -> dict[str, str]:
    """Names in the module -> names in the file. LoadError: a tensor has no place there."""
    ours: dict[str, str] = {}
    wrong: list[str] = []
    for theirs, tensor in read_header(path).items():
        name = rename(theirs)
        if name is None:
            continue
        if name not in shapes:
            wrong.append(f"{theirs} is unknown" + ("" if name == theirs else f" (as {name})"))
        elif tensor.shape != shapes[name]:
            wrong.append(f"{theirs} is {_sides(tensor.shape)} and should be {_sides(shapes[name])}")
        elif tensor.whole and name in floats:
            wrong.append(f"{theirs} is {tensor.dtype} and should be floating")
        elif name in ours:
            wrong.append(f"{theirs} and {ours[name]} are both {name}")
        else:
            ours[name] = theirs
    _refuse(str(path), wrong)
    return ours


def _once(names: Mapping[Path, Mapping[str, str]]) -> set[str]:
    """All names in the module that the files fill. LoadError: two files have the same."""
    found: dict[str, Path] = {}
    for path, ours in names.items():
        _refuse(str(path), [f"{name} is in {found[name]} too" for name in sorted(ours.keys() & found)])
        found |= dict.fromkeys(ours, path)
    return set(found)


def _read(path: Path, names: Mapping[str, str], placement: Placement) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    with safe_open(str(path), framework="pt", device=str(placement.device)) as file:
        for ours, theirs in names.items():
            value = file.get_tensor(theirs)
            weights[ours] = value.to(placement.dtype) if value.is_floating_point() else value
    return weights


def _refuse(where: str, wrong: list[str]) -> None:
    if wrong:
        more = f" and {len(wrong) - _TOLD} more" if len(wrong) > _TOLD else ""
        raise LoadError(f"{where}: weights do not fit the model: {', '.join(wrong[:_TOLD])}{more}")


def _sides(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "a single value"
