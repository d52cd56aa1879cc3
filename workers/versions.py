"""Which versions made a picture: for sidecars and reports."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("saggar", "torch", "diffusers", "transformers", "cache-dit", "flash-attn", "fa3-fwd")


def versions() -> dict[str, str]:
    """The installed ones of the packages that a picture's pixels depend on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
