"""A tiny Qwen-Image."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.qwen_parts import DESCRIBE, build_qwen_image


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    build_qwen_image(folder, seed, "QwenImagePipeline", DESCRIBE)
