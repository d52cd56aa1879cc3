"""Which kernel a site gets: role → its category → the default → the platform's table."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence

import saggar.engine.attention.backends
from saggar.engine.attention.base import Backend, Need
from saggar.engine.choices import Choice, wish_of
from saggar.engine.errors import Unsupported


def backends() -> list[str]:
    """The kernels that there are files for."""
    return sorted(module.name for module in pkgutil.iter_modules(saggar.engine.attention.backends.__path__))


def kernel(name: str) -> type[Backend]:
    """A kernel's class. Unsupported: no such kernel, or its package is not installed."""
    if name not in backends():
        raise Unsupported(f"attention: there is no kernel {name!r}, but {', '.join(backends())}")
    found: type[Backend] = importlib.import_module(
        f"{saggar.engine.attention.backends.__name__}.{name}"
    ).KERNEL
    if (missing := found.missing()) is not None:
        raise Unsupported(f"attention {name} is not installed: {missing}")
    return found


def choose(
    site: str, role: str, need: Need, choices: Mapping[str, Choice], defaults: Sequence[str]
) -> Backend:
    """The kernel of a site. Unsupported names the site that an explicit choice cannot serve, and why."""
    wish = wish_of(role, choices)
    if wish is not None:
        backend = kernel(wish.backend)(wish.options)
        if (why := backend.traits.refusal(need)) is not None:
            raise Unsupported(f"attention {wish.backend} cannot serve {site} ({role}): {why}")
        return backend
    reasons = []
    for name in defaults:
        backend = kernel(name)()
        if (why := backend.traits.refusal(need)) is None:
            return backend
        reasons.append(f"{name}: {why}")
    raise Unsupported(f"attention: no kernel of this platform serves {site} ({role}): {'; '.join(reasons)}")
