"""Which family serves which pipeline class, and where models are found by name.

Families register themselves with `@serves("FluxPipeline")`. Those of this package are found by looking
through its modules, those of other packages by the entry point group `saggar.models`: adding one needs no
edit here.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import saggar.engine.models
from saggar.engine.errors import EngineError, LoadError, Unsupported
from saggar.engine.models.base import Family
from saggar.engine.models.diffusers_any.family import family_of
from saggar.engine.models.packages import import_plugins
from saggar.engine.models.source.checkpoint import Checkpoint, readable
from saggar.engine.models.source.huggingface import fetch, outlined_on_hub, split_id

AnyFamily: TypeAlias = Family[Any, Any, Any]
_FAMILIES: dict[str, type[AnyFamily]] = {}
_F = TypeVar("_F", bound=type[AnyFamily])

ASSETS = Path(__file__).resolve().parent.parent / "assets"
NAMESPACE = "saggar"
_SHOWN = 100
_WITH_TORCH = {"common", "hunyuan_video15_parts", "wan_picture"}
"""Modules here that the engine's process must not import. Sub-packages hold no families."""


def serves(*class_names: str) -> Callable[[_F], _F]:
    """Class decorator: this family runs checkpoints of these pipeline classes. Unsupported: another one does."""

    def register(family: _F) -> _F:
        for name in class_names:
            other = _FAMILIES.setdefault(name, family)
            if _spelled(other) != _spelled(family):
                raise Unsupported(
                    f"{name} is served by {_spelled(other)}, and {_spelled(family)} wants it too"
                )
            _FAMILIES[name] = family
        return family

    return register


def families() -> dict[str, type[AnyFamily]]:
    """All families by pipeline class."""
    _import_all()
    return dict(sorted(_FAMILIES.items()))


def open_family(model: str) -> AnyFamily:
    """The family of a model, without weights; a hub id's files are fetched. Unsupported: unknown name or class;
    LoadError: a damaged folder.
    """
    return family_in(resolve(model), model)


def family_in(folder: Path, model: str) -> AnyFamily:
    """As `open_family`, of a folder whose model has that name."""
    with readable(folder, named=True):
        return _family_in(folder, model)


def _family_in(folder: Path, model: str) -> AnyFamily:
    checkpoint = Checkpoint(folder)
    known = families()
    family = known.get(checkpoint.class_name) or family_of(checkpoint.class_name)
    if family is None:
        raise Unsupported(
            f"{model}: no family serves {checkpoint.class_name}; there are {', '.join(known)}, and diffusers has no"
            " such pipeline either: install its plug-in, or another version of diffusers"
        )
    try:
        return family(checkpoint)
    except LoadError as error:
        if str(checkpoint.folder) in str(error):
            raise
        raise LoadError(f"{checkpoint.folder}: {error}") from error
    except EngineError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise LoadError(f"{checkpoint.folder}: unusable configuration: {error!r}") from error


def resolve(model: str) -> Path:
    """The folder of a model: a folder, a name such as `saggar/emoji` that comes with the engine, or a hub id,
    whose files are fetched unless they are cached. Unsupported says what is wrong with any other.
    """
    return _here(model) or fetch(model)


@contextmanager
def outlined(model: str) -> Iterator[tuple[Path, bool]]:
    """As `resolve`, for who only looks: weights that are not here are not fetched. Whether all of it lies here."""
    if folder := _here(model):
        yield folder, True
        return
    with outlined_on_hub(model) as (folder, whole):
        yield folder, whole


def _here(model: str) -> Path | None:
    """None: it is a hub id."""
    try:
        folder = Path(model).expanduser()
        if folder.is_dir():
            return folder.resolve()
    except (OSError, RuntimeError) as error:  # too long, a loop of links, the home of nobody
        raise Unsupported(f"no model {model[:_SHOWN]!r}: {_reason(error)}") from error
    if model in installed():
        return ASSETS / model.removeprefix(f"{NAMESPACE}/")
    if "://" in model:
        named = model if "@" not in model else f"{model.partition('://')[0]}://..."  # it may hold a password
        raise Unsupported(f"{named}: the engine loads from folders: `saggar worker` fetches from S3 first")
    if split_id(model) and not model.startswith(f"{NAMESPACE}/"):
        return None
    known = ", ".join(installed()) or "none installed"
    raise Unsupported(
        f"no model {model[:_SHOWN]!r}: it is no folder and no hub id (org/name), and the known names are: {known}"
    )


def _reason(error: Exception) -> str:
    return str(error.strerror if isinstance(error, OSError) else error)


def installed() -> list[str]:
    """Names of the models that come with the engine."""
    return [f"{NAMESPACE}/{path.parent.name}" for path in sorted(ASSETS.glob("*/model_index.json"))]


@cache
def _import_all() -> None:
    for module in pkgutil.iter_modules(saggar.engine.models.__path__):
        if not module.ispkg and module.name not in _WITH_TORCH:
            importlib.import_module(f"{saggar.engine.models.__name__}.{module.name}")
    import_plugins()


def _spelled(family: type[AnyFamily]) -> str:
    return f"{family.__module__}.{family.__qualname__}"
