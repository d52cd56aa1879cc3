"""A model folder read without its weights: class, configurations, settings, revision. No torch.

Beside diffusers' `model_index.json` a folder may hold `saggar.json`:
{"params": {"height": {"default": 64, "multipleOf": 8}, ...}, "negative_prompt": "", "limits": {"max_outputs": 16}}
whose `params` narrow or replace words of the parameters' schema, and whose `negative_prompt` stands in where a request
has none: with "" guidance works without asking.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

from saggar.engine.errors import LoadError
from saggar.engine.models.source.files import INDEX, SETTINGS, json_object
from saggar.engine.params import Narrowing
from saggar.engine.request import JsonValue

LARGE_BYTES = 1 << 20
"""Larger files count for a revision by their start and end alone."""
SAMPLE_BYTES = 1 << 16
"""So many bytes of each."""
_LONGEST_NAME = 100


@contextmanager
def readable(folder: Path, named: bool = False) -> Iterator[None]:
    """Around what reads the files of a folder. LoadError: one cannot be read, or went away meanwhile. `named`: around
    what does more than that; errors that name no file of the folder pass.
    """
    try:
        yield
    except OSError as error:
        if named and not _lies_in(folder, error.filename):
            raise
        raise LoadError(
            f"{error.filename or folder}: {error.strerror or error}: let this process read all of the folder, and"
            " leave it as it is meanwhile"
        ) from error


def _lies_in(folder: Path, filename: object) -> bool:
    if not isinstance(filename, str | bytes | os.PathLike):
        return False
    return Path(os.path.abspath(os.fsdecode(filename))).is_relative_to(folder.absolute())


@dataclass(frozen=True)
class Checkpoint:
    """`folder` holds a model_index.json. LoadError: it is missing or not readable."""

    folder: Path

    @cached_property
    def index(self) -> dict[str, JsonValue]:
        """The content of model_index.json."""
        if not (self.folder / INDEX).is_file():
            raise LoadError(f"{self.folder}: there is no {INDEX}")
        return _read_json(self.folder / INDEX)

    @property
    def class_name(self) -> str:
        """The pipeline's class as the checkpoint names it."""
        name = self.index.get("_class_name")
        if not isinstance(name, str):
            raise LoadError(f"{self.folder}/{INDEX}: _class_name is missing")
        return self._name("_class_name", name)

    @property
    def components(self) -> dict[str, tuple[str, str] | None]:
        """The parts that model_index.json names: component -> (library, class), None where one is left out. LoadError:
        a name that is none, for it becomes a folder's.
        """
        return {
            self._name("the component", name): None if value[0] is None else (str(value[0]), str(value[1]))
            for name, value in self.index.items()
            if isinstance(value, list) and len(value) == 2
        }

    def _name(self, what: str, name: str) -> str:
        if not name.isidentifier() or len(name) > _LONGEST_NAME:
            raise LoadError(f"{self.folder}/{INDEX}: {what} {name[:_LONGEST_NAME]!r} is not a name")
        return name

    def pipeline_settings(self, known: Container[str]) -> dict[str, JsonValue]:
        """What model_index.json says to the pipeline itself, as far as it is known."""
        return {
            name: value
            for name, value in self.index.items()
            if name in known and name not in self.components and not name.startswith("_")
        }

    def config(self, component: str) -> dict[str, JsonValue]:
        """The configuration of one component: a model's, a scheduler's or a tokenizer's. LoadError."""
        for name in ("config.json", "scheduler_config.json", "tokenizer_config.json"):
            if (self.folder / component / name).is_file():
                return _read_json(self.folder / component / name)
        raise LoadError(f"{self.folder}: component {component} is missing or has no configuration")

    def file(self, name: object) -> Path:
        """A file that model_index.json names, relative to the folder. LoadError: no name, outside, or not there."""
        if not isinstance(name, str) or not name:
            raise LoadError(f"{self.folder}/model_index.json: {name!r} is not the name of a file")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise LoadError(f"{self.folder}/model_index.json: {name} is not inside the folder")
        if not (self.folder / name).is_file():
            raise LoadError(f"{self.folder}: {name} is missing, and model_index.json names it")
        return self.folder / name

    def read(self, name: object) -> dict[str, JsonValue]:
        """A JSON object in a file that model_index.json names. LoadError as in `file`, or it is not one."""
        return _read_json(self.file(name))

    @cached_property
    def settings(self) -> dict[str, JsonValue]:
        """The content of saggar.json, empty if there is none."""
        path = self.folder / SETTINGS
        return _read_json(path) if path.is_file() else {}

    @property
    def narrowing(self) -> Narrowing:
        """The parameters' schema words that saggar.json sets. LoadError: they are none."""
        words = self.settings.get("params", {})
        if not isinstance(words, dict) or not all(isinstance(own, dict) for own in words.values()):
            raise LoadError(
                f'{self.folder}/{SETTINGS}: params: write an object a parameter: {{"height": {{...}}}}'
            )
        return cast(Narrowing, words)

    @property
    def negative_prompt(self) -> str | None:
        """What stands in for a negative prompt that a request does not have; None: nothing does."""
        value = self.settings.get("negative_prompt")
        if value is not None and not isinstance(value, str):
            raise LoadError(f"{self.folder}/{SETTINGS}: negative_prompt is not a text")
        return value

    @property
    def limits(self) -> dict[str, int]:
        """Limits that saggar.json sets. LoadError: not whole numbers from 1 on."""
        limits = self.settings.get("limits", {})
        if not isinstance(limits, dict) or not all(
            type(most) is int and most > 0 for most in limits.values()
        ):
            raise LoadError(f"{self.folder}/{SETTINGS}: limits: write an integer from 1 on for each")
        return cast("dict[str, int]", limits)

    @cached_property
    def revision(self) -> str:
        """A digest of the folder: small files whole, of large ones name, size, start and end. LoadError."""
        with readable(self.folder):
            return self._digest()

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and not any(
                part.startswith(".") for part in path.relative_to(self.folder).parts
            ):
                digest.update(f"{path.relative_to(self.folder).as_posix()}:{path.stat().st_size}:".encode())
                digest.update(_sample(path))
        return digest.hexdigest()[:16]


def _sample(path: Path) -> bytes:
    if path.stat().st_size <= LARGE_BYTES:
        return path.read_bytes()
    with path.open("rb") as file:
        start = file.read(SAMPLE_BYTES)
        file.seek(-SAMPLE_BYTES, 2)
        return start + file.read()


def _read_json(path: Path) -> dict[str, JsonValue]:
    with readable(path):
        content = path.read_bytes()
    return json_object(content, path)
