"""A tiny Qwen-Image-Edit: its references have as many pixels as 64×64."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.parts import SIZE
from saggar.engine.models.tiny.qwen_parts import EDIT, build_qwen_image


def build(folder: Path, seed: int, kind: str = "QwenImageEditPipeline") -> None:
    """Write it into `folder`, or one of another pipeline."""
    build_qwen_image(folder, seed, kind, EDIT, {"reference_pixels": SIZE * SIZE}, text=None)
