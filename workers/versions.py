"""Which versions made an output: for sidecars and reports."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "saggar",
    "torch",
    "diffusers",
    "transformers",
    "cache-dit",
    "flash-attn",
    "fa3-fwd",
    "pillow",
    "av",
    "soundfile",
)


def versions() -> dict[str, str]:
    """The installed ones of the packages that an output's pixels, samples and bytes depend on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
