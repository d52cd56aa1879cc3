"""Decoding in less memory: one picture after the other, or large ones by overlapping tiles. Both are the VAE's own.

A VAE that knows tiles in time (LTX-2's) decodes by those too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from saggar.engine.config import EngineConfig
from saggar.engine.errors import Unsupported


class Decoding(Protocol):
    """What is needed of a family."""

    @property
    def name(self) -> str: ...
    def decoders(self) -> Mapping[str, object]: ...


def spare_memory(config: EngineConfig, family: Decoding) -> None:
    """Unsupported: what is asked for is nothing that this family's VAE can do."""
    wishes = {"vae_slicing": "enable_slicing", "vae_tiling": "enable_tiling"}
    for wish, method in wishes.items():
        if not getattr(config, wish):
            continue
        able = [one for one in family.decoders().values() if _can(one, method)]
        if not able:
            raise Unsupported(f"{wish}: {family.name} has no VAE that does so; leave it out")
        for decoder in able:
            getattr(decoder, method)()
            if wish == "vae_tiling" and hasattr(decoder, "use_framewise_decoding"):
                decoder.use_framewise_decoding = True


def _can(decoder: object, method: str) -> bool:
    """diffusers gives the methods to every autoencoder; those that cannot have no such switch."""
    return hasattr(decoder, method) and hasattr(decoder, method.replace("enable", "use"))
