"""A tiny Qwen-Image-Edit of many references, such as 2509."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.qwen_image_edit import build as build_edit


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    build_edit(folder, seed, "QwenImageEditPlusPipeline")
