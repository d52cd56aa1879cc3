"""A pipeline of diffusers from its folder, its weights straight to the rank's device. Imports torch."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from saggar.engine.errors import EngineError, LoadError
from saggar.engine.models.source.checkpoint import Checkpoint
from saggar.engine.models.source.files import AGAIN
from saggar.engine.models.source.weights import Weights, read_weights
from saggar.engine.platform.base import Placement

LIBRARIES = ("diffusers", "transformers")
_LONGEST_REASON = 400
_AUTO = {"AutoTokenizer", "AutoProcessor", "AutoImageProcessor", "AutoFeatureExtractor"}
_NEEDED = ("transformer", "unet", "vae", "scheduler")
"""Parts without which no pipeline makes anything, unless its class says so. Some do without an encoder of texts."""
_VOCABULARY = re.compile(r"tokenizer\.json|tekken\.json|vocab.*\.(json|txt)|.*\.(model|tiktoken)")
_SMALL = {
    "BaseGuidance",
    "FeatureExtractionMixin",
    "ImageProcessingMixin",
    "PreTrainedTokenizerBase",
    "ProcessorMixin",
    "SchedulerMixin",
    "VaeImageProcessor",
}
"""What is no model and yet a part of pipelines: classes that read no weights."""


def load_pipeline(
    class_name: str,
    checkpoint: Checkpoint,
    placement: Placement,
    loaded_as: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """The pipeline over its parts, on the rank's device and without gradients. `loaded_as`: classes in place of those
    that the checkpoint names, by component, of the same library, or anywhere as `module:Class`.

    Weights come from safetensors alone: a pickle could run code. All files are looked at before any is loaded.
    LoadError: a missing or damaged component, wrong shapes or dtypes, weights that lack names or have more layers
    than their config.json, no safetensors.
    """
    for library in LIBRARIES:
        importlib.import_module(f"{library}.utils.logging").disable_progress_bar()
    # Their warnings quote what they cut of prompts, and no log may.
    logging.getLogger("diffusers.pipelines").setLevel(logging.ERROR)
    kinds = {
        name: _kind(checkpoint, name, source[1], loaded_as.get(name, ""))
        for name, source in checkpoint.components.items()
        if source
    }
    _require_parts(class_name, checkpoint)
    weights = {
        name: read_weights(checkpoint.folder / name)
        for name, kind in kinds.items()
        if issubclass(kind, torch.nn.Module)
    }
    parts: dict[str, object] = dict.fromkeys(checkpoint.components)
    parts |= {name: _load_part(kinds[name], checkpoint.folder / name, weights, placement) for name in kinds}
    try:
        kind = getattr(importlib.import_module("diffusers"), class_name)
        return kind(**parts, **checkpoint.pipeline_settings(inspect.signature(kind).parameters))
    except (TypeError, ValueError) as error:
        raise LoadError(f"{checkpoint.folder}: its parts do not make a {class_name}: {error}") from error


def load_component(checkpoint: Checkpoint, name: str, placement: Placement) -> Any:
    """One component that model_index.json names, as `load_pipeline` loads it: for families that have other parts of
    their own. LoadError as there.
    """
    source, folder = checkpoint.components.get(name), checkpoint.folder / name
    if source is None:
        raise LoadError(f"{checkpoint.folder}/model_index.json: there is no component {name}")
    kind = _kind(checkpoint, name, source[1])
    weights = {name: read_weights(folder)} if issubclass(kind, torch.nn.Module) else {}
    return _load_part(kind, folder, weights, placement)


def _require_parts(class_name: str, checkpoint: Checkpoint) -> None:
    kind = getattr(importlib.import_module("diffusers"), class_name, None)
    optional = getattr(kind, "_optional_components", ())
    for name in _NEEDED:
        if checkpoint.components.get(name, "") is None and name not in optional:
            raise LoadError(
                f"{checkpoint.folder}/model_index.json: component {name} is left out, and {class_name} cannot do"
                " without it"
            )


def _kind(checkpoint: Checkpoint, name: str, class_name: str, instead: str = "") -> type[Any]:
    """The class of a component; `instead` is the family's word, not the checkpoint's."""
    source = checkpoint.components[name]
    assert source is not None
    library = source[0]
    if not (checkpoint.folder / name).is_dir():
        raise LoadError(
            f"{checkpoint.folder}: component {name} is missing: {AGAIN}, or write [null, null] for it in"
            " model_index.json if the pipeline can do without"
        )
    place, _, ours = instead.rpartition(":")
    if place:
        return getattr(importlib.import_module(place), ours)  # type: ignore[no-any-return]
    class_name = ours or class_name
    # A checkpoint names classes, not modules to import at will.
    module = library if library in LIBRARIES else f"diffusers.pipelines.{library}"
    known = library in LIBRARIES or (library.isidentifier() and importlib.util.find_spec(module))
    kind = getattr(importlib.import_module(module), class_name, None) if known else None
    if not isinstance(kind, type):
        raise LoadError(
            f"{checkpoint.folder}: component {name}: {library} has no class {class_name}: this checkpoint needs another"
            " version of it, or a plug-in"
        )
    if not (issubclass(kind, torch.nn.Module) or _is_small(kind)):
        raise LoadError(
            f"{checkpoint.folder}: component {name}: {class_name} is neither a model nor a tokenizer, processor or"
            " scheduler: name the class itself in model_index.json"
        )
    return kind


def _is_small(kind: type[Any]) -> bool:
    """Whether it is read from configurations alone. Others, such as AutoModel or a whole pipeline, fall back to
    pickles where they find no safetensors.
    """
    names = {base.__name__ for base in kind.__mro__}
    is_placeholder = type(kind).__name__ == "DummyObject"  # which says what has to be installed
    return is_placeholder or kind.__name__ in _AUTO or not _SMALL.isdisjoint(names)


def _load_part(kind: Any, folder: Path, weights: Mapping[str, Weights], placement: Placement) -> object:
    try:
        if folder.name in weights:
            return _load_module(kind, folder, weights[folder.name], placement)
        options = {"trust_remote_code": False} if kind.__name__ in _AUTO else {}  # or it asks at the terminal
        part: object = kind.from_pretrained(str(folder), local_files_only=True, **options)
    except EngineError:
        raise
    except Exception as error:
        wrong = _disagreements(kind, folder, weights[folder.name]) if folder.name in weights else ""
        raise LoadError(f"{folder}: {wrong or _one_line(error)}") from error
    _check_tokenizer(getattr(part, "tokenizer", part), folder)
    return part


def _check_tokenizer(part: object, folder: Path) -> None:
    """LoadError: it was made of nothing, which transformers does without a word: all texts would be one to it."""
    if not any(base.__name__ == "PreTrainedTokenizerBase" for base in type(part).__mro__):
        return
    names = {path.name for path in folder.iterdir()}
    if "tokenizer_config.json" not in names:
        raise LoadError(f"{folder}: tokenizer_config.json is missing: {AGAIN}")
    if getattr(part, "vocab_files_names", None) and not any(map(_VOCABULARY.fullmatch, names)):
        raise LoadError(
            f"{folder}: the tokenizer has no vocabulary, such as tokenizer.json or vocab.json: {AGAIN}"
        )


def _load_module(kind: Any, folder: Path, weights: Weights, placement: Placement) -> torch.nn.Module:
    """With one device in the map the libraries put each tensor there as it is read, and leave no hooks behind."""
    ours = kind.__module__.partition(".")[0] == "diffusers"
    options: dict[str, object] = {"torch_dtype": placement.dtype} if ours else {"dtype": placement.dtype}
    if not ours:
        options["ignore_mismatched_sizes"] = True  # they are refused below, with their names
    module, info = kind.from_pretrained(
        str(folder),
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        variant=weights.variant,
        device_map={"": placement.device},
        **options,
    )
    wrong = [
        f"{key[0]} is {_shape(key[1])} and should be {_shape(key[2])}" for key in info["mismatched_keys"]
    ]
    wrong += [f"{key} is missing" for key in info["missing_keys"]]
    wrong += _surplus_layers(module, info["unexpected_keys"])
    wrong += _no_floats(module, weights)
    if wrong:
        raise LoadError(f"{folder}: {_told(wrong)}")
    return module.to(placement.device).requires_grad_(False).eval()  # type: ignore[no-any-return]


def _surplus_layers(module: torch.nn.Module, unexpected: Iterable[str]) -> list[str]:
    """Layers in the weights behind the last one that the configuration counts: without them it computes something else.
    Other names that are not known are passed over, as both libraries do.
    """
    counts = {
        name: len(layers)
        for name, layers in module.named_modules()
        if isinstance(layers, torch.nn.ModuleList)
    }
    found = set()
    for key in unexpected:
        parts = key.split(".")
        for at, number in enumerate(parts):
            layers = ".".join(parts[:at])
            if number.isdecimal() and int(number) >= counts.get(layers, math.inf):
                found.add(f"{layers}.{number} is one more than the {counts[layers]} of its config.json")
    return sorted(found)


def _no_floats(module: torch.nn.Module, weights: Weights) -> list[str]:
    """Whole numbers in the file where the model computes with fractions: a quantization that nothing undoes."""
    return [
        f"{name} is {weights.tensors[name].dtype} and should be floating"
        for name, value in module.state_dict().items()
        if value.is_floating_point() and name in weights.tensors and weights.tensors[name].whole
    ]


def _disagreements(kind: Any, folder: Path, weights: Weights) -> str:
    """How the weights of a model of diffusers differ from what its configuration wants; "" if they do not."""
    if kind.__module__.partition(".")[0] != "diffusers":
        return ""
    with torch.device("meta"):
        wanted = kind.from_config(kind.load_config(str(folder))).state_dict()
    found = weights.tensors
    wrong = [
        f"{name} is {_shape(found[name].shape)} and should be {_shape(value.shape)}"
        for name, value in wanted.items()
        if name in found and found[name].shape != tuple(value.shape)
    ]
    return _told([*wrong, *(f"{name} is missing" for name in wanted if name not in found)])


def _told(wrong: list[str]) -> str:
    if not wrong:
        return ""
    more = f" and {len(wrong) - 2} more" if len(wrong) > 2 else ""
    return f"weights do not fit its config.json: {', '.join(sorted(wrong)[:2])}{more}: they belong to another one"


def _shape(shape: Any) -> str:
    return "×".join(str(int(side)) for side in shape)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_LONGEST_REASON]}"
