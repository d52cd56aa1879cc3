"""Safetensors files read by their headers: what is in them, whether they are whole. No torch, no weights.

The form: 8 bytes, the length of a JSON object, the object (name -> dtype, shape, data_offsets), the data.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from saggar.engine.errors import LoadError
from saggar.engine.models.source.files import AGAIN, choose_weights

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
LONGEST_HEADER = 100_000_000
_LFS = b"version https://git-lfs"
_PICKLED = (b"PK\x03\x04", b"\x80\x02", b"\x80\x04")


@dataclass(frozen=True)
class Tensor:
    """One entry of a header; `dtype` as safetensors writes it: F32, BF16, F8_E4M3, I64."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def values(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)

    @property
    def whole(self) -> bool:
        """Whether they are whole numbers or truth values, not fractions."""
        return self.dtype.startswith(("I", "U", "BOOL"))


@dataclass(frozen=True)
class Weights:
    """The weights' files of one component, of one variant (None: the plain files), and all that is in them."""

    variant: str | None
    files: tuple[Path, ...]
    tensors: dict[str, Tensor]


def read_weights(folder: Path) -> Weights:
    """What a component would be loaded from. LoadError: no safetensors, a shard is missing, or one is damaged."""
    variant, names = choose_weights(path.name for path in folder.iterdir() if path.is_file())
    dangling = [path.name for path in folder.iterdir() if not path.exists()]
    if dangling:
        raise LoadError(f"{folder}: {dangling[0]} is a link to nothing: {AGAIN}")
    if not names:
        raise LoadError(_no_weights(folder))
    _check_shards(folder, variant, set(names))
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors |= read_header(folder / name)
    return Weights(variant, tuple(folder / name for name in names), tensors)


def read_header(path: Path) -> dict[str, Tensor]:
    """A file's tensors by name. LoadError: it is no safetensors file, or not a whole one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(64)
        if start.startswith(_LFS):
            raise LoadError(
                f"{path}: a pointer of Git LFS, not the weights: run `git lfs pull` in its folder"
            )
        if start.startswith(_PICKLED):
            raise LoadError(f"{path}: a pickle under another name, which is never loaded: {_CONVERT}")
        length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
        if not 2 <= length <= min(LONGEST_HEADER, size - 8):
            raise LoadError(f"{path}: no safetensors file, or cut off in its header: {AGAIN}")
        file.seek(8)
        text = file.read(length)
    try:
        tensors, end = _parse(text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(f"{path}: its header is damaged: {AGAIN}") from error
    if 8 + length + end != size:
        raise LoadError(f"{path}: {size} bytes, and it should have {8 + length + end}: {AGAIN}")
    return tensors


_CONVERT = (
    "convert it (save_pretrained with safe_serialization=True), or take a revision that has safetensors"
)


def _parse(text: bytes) -> tuple[dict[str, Tensor], int]:
    """Tensors, and where the data of the last one ends. ValueError and its like: they overlap, leave gaps, or have
    another size than their shape says.
    """
    tensors, places = {}, []
    for name, entry in json.loads(text).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            tensors[name] = _tensor(entry["dtype"], entry["shape"], last - first)
            places.append((first, last))
    end = 0
    for first, last in sorted(places):
        if first != end:
            raise ValueError(f"data begins at {first}, not at {end}")
        end = last
    return tensors, end


def _tensor(dtype: object, shape: list[object], size: object) -> Tensor:
    """ValueError: they do not go together."""
    sides = [side for side in shape if type(side) is int and side >= 0]
    if not (isinstance(dtype, str) and dtype.isidentifier() and type(size) is int and size >= 0):
        raise ValueError("no dtype, or no place of its data")
    tensor = Tensor(dtype, tuple(sides), size)
    bits = int((re.match(r"[A-Z]+(\d+)", dtype) or ["", "0"])[1])
    if len(sides) < len(shape) or (bits and tensor.values * bits != size * 8):
        raise ValueError("its shape has another size than its data")
    return tensor


def _check_shards(folder: Path, variant: str | None, names: set[str]) -> None:
    """LoadError: an index names a shard of this variant that is not there, or is none."""
    for path in sorted(folder.glob("*.safetensors.index*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            shards = set(content["weight_map"].values())
            of_variant, _ = choose_weights(shards)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise LoadError(f"{path}: not an index of shards: {AGAIN}") from error
        if of_variant == variant and (missing := sorted(shards - names)):
            raise LoadError(f"{folder}: the shard {missing[0]} is missing: {AGAIN}")
        if of_variant == variant and "metadata" not in content:  # both libraries read it
            raise LoadError(f"{path}: it has no metadata: {AGAIN}")


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    only = f", only {pickles[0]}, a pickle, which could run code" if pickles else ""
    return f"{folder}: there are no weights in safetensors, the only form that is loaded{only}: " + (
        _CONVERT if pickles else AGAIN
    )
