"""What a checkpoint is and needs, from its configuration and the headers of its files: no weights, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from saggar.engine.errors import LoadError
from saggar.engine.models.capabilities import Capabilities, capabilities
from saggar.engine.models.registry import AnyFamily, family_in, outlined
from saggar.engine.models.source.checkpoint import Checkpoint, readable
from saggar.engine.models.source.files import WEIGHTS, needed
from saggar.engine.models.source.weights import PICKLES, Tensor, read_header, read_weights
from saggar.engine.request import JsonValue, ModelInfo

FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
"""The dtypes that loading turns into the wanted one."""
_WITHOUT_WEIGHTS = ("Tokenizer", "TokenizerFast", "Processor", "ProcessorFast", "Extractor", "Scheduler")
WANTED = {"float32": 4, "bfloat16": 2}
"""Bytes of one value; float16 needs as much as bfloat16."""


@dataclass(frozen=True)
class Part:
    """A component with weights, or a file of weights beside the components, which has no class: `stored` are bytes by
    dtype in the files, `loaded` bytes by the dtype asked for.
    """

    name: str
    class_name: str
    values: int
    stored: Mapping[str, int]
    loaded: Mapping[str, int]
    variant: str | None
    trouble: str | None = None
    """What is wrong with its files, if something is."""


@dataclass(frozen=True)
class Inspection:
    """A checkpoint as it would be served. `folder`: where it lies; None: elsewhere, its weights were not fetched."""

    info: ModelInfo
    can: Capabilities
    folder: str | None
    parts: tuple[Part, ...]

    @property
    def loaded(self) -> dict[str, int]:
        """Bytes of all weights by the dtype asked for; activations come on top."""
        return {dtype: sum(part.loaded[dtype] for part in self.parts) for dtype in WANTED}

    def to_dict(self) -> dict[str, JsonValue]:
        """Plain JSON values."""
        can: dict[str, JsonValue] = {
            name: list(value) if isinstance(value, tuple) else value for name, value in vars(self.can).items()
        }
        parts: list[JsonValue] = [
            {**vars(part), "stored": dict(part.stored), "loaded": dict(part.loaded)} for part in self.parts
        ]
        memory: dict[str, JsonValue] = dict(self.loaded.items())
        return {
            **self.info.to_dict(),
            "folder": self.folder,
            "capabilities": can,
            "components": parts,
            "loaded_bytes": memory,
        }


def inspect_model(model: str, max_batch: int = 8, outline: Path | None = None) -> Inspection:
    """Raises as `open_family`. Of a hub id settings and headers are fetched, not the weights; of a model elsewhere the
    caller has an outline (source/outline.py). Damaged weights are no error here: their component says so.
    """
    if outline is not None:
        return _inspect(model, max_batch, outline, here=False)
    with outlined(model) as (folder, here):
        return _inspect(model, max_batch, folder, here)


def _inspect(model: str, max_batch: int, folder: Path, here: bool) -> Inspection:
    try:
        family = family_in(folder, model)
        with readable(folder):
            parts = tuple(_parts(family))
    except LoadError as error:
        raise LoadError(_placed(str(error), folder, model, here)) from error
    parts = tuple(
        replace(part, trouble=part.trouble and _placed(part.trouble, folder, model, here)) for part in parts
    )
    can = capabilities(type(family), (family.checkpoint.class_name,))
    return Inspection(family.info(model, max_batch, ""), can, str(folder) if here else None, parts)


def _placed(text: str, folder: Path, model: str, here: bool) -> str:
    """What is wrong under the model's own name, where the folder is an outline that is gone in a moment."""
    return text if here else text.replace(str(folder), model)


def _parts(family: AnyFamily) -> Iterable[Part]:
    checkpoint = family.checkpoint
    for name, source in checkpoint.components.items():
        folder = checkpoint.folder / name
        if source is None:
            continue
        if not folder.is_dir():
            yield _part(name, source[1], {}, None, "the folder is missing")
        elif _has_weights(folder, source[1]):
            try:
                found = read_weights(folder)
            except LoadError as error:
                yield _part(name, source[1], {}, None, str(error))
            else:
                yield _part(name, source[1], found.tensors, found.variant, None)
    for name in _beside(checkpoint):
        try:
            tensors = read_header(checkpoint.folder / name)
        except LoadError as error:
            yield _part(name, "", {}, None, str(error))
        else:
            yield _part(name, "", tensors, None, None)


def _has_weights(folder: Path, class_name: str) -> bool:
    """Whether there are weights, or should be: a config.json is a model's, but where a tokenizer has one too."""
    if any(path.suffix in (WEIGHTS, *PICKLES) for path in folder.iterdir()):
        return True
    return (folder / "config.json").is_file() and not class_name.endswith(_WITHOUT_WEIGHTS)


def _beside(checkpoint: Checkpoint) -> Iterable[str]:
    """Weights that model_index.json names outside of the components' folders, as models that are not diffusers' do."""
    names = [
        path.relative_to(checkpoint.folder).as_posix() for path in checkpoint.folder.rglob(f"*{WEIGHTS}")
    ]
    return [
        name
        for name in needed(checkpoint.index, names)
        if name.partition("/")[0] not in checkpoint.components
    ]


def _part(
    name: str, class_name: str, tensors: Mapping[str, Tensor], variant: str | None, trouble: str | None
) -> Part:
    stored: Counter[str] = Counter()
    for tensor in tensors.values():
        stored[tensor.dtype] += tensor.bytes
    values = sum(tensor.values for tensor in tensors.values())
    floats = sum(tensor.values for tensor in tensors.values() if tensor.dtype in FLOATS)
    others = sum(tensor.bytes for tensor in tensors.values() if tensor.dtype not in FLOATS)
    loaded = {dtype: floats * size + others for dtype, size in WANTED.items()}
    return Part(name, class_name, values, dict(stored), loaded, variant, trouble)
