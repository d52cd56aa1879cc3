"""A tiny Wan 2.1 for a first and a last picture: the transformer has places for the tokens of both."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.wan_i2v import write_i2v


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    write_i2v(folder, seed, pos_embed_seq_len=2 * 17)
