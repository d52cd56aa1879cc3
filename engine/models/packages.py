"""Packages from elsewhere: plug-ins, which bring families along, and what a family needs beside the engine's own
libraries. No torch.

A plug-in names its modules under the entry point group `saggar.models`; importing them registers their families.
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from saggar.engine.errors import EngineError, LoadError, Unsupported

GROUP = "saggar.models"


def import_plugins() -> None:
    """Import the modules of all plug-ins. Unsupported: one of them cannot be imported; it says which and why."""
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except EngineError:
            raise
        except Exception as error:
            raise Unsupported(
                f"the plug-in {point.value} of {_package(point)} cannot be imported: {type(error).__name__}: {error}:"
                f" mend it, or pip uninstall {point.dist.name if point.dist else point.name}"
            ) from error


def package_of(family: type[Any]) -> str:
    """The plug-in that a family comes from, as `name version`; "" for the engine's own."""
    top = _top(family.__module__)
    return next((_package(point) for point in entry_points(group=GROUP) if _top(point.module) == top), "")


def need(module: str, package: str, whose: str) -> Any:
    """Import a module that is not on every machine. LoadError names `whose` need it is, the package, and the command
    that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise LoadError(
            f"{whose} needs the package {package}: pip install {package!r} ({type(error).__name__}: {error})"
        ) from error


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"


def _top(module: str) -> str:
    return module.partition(".")[0]
