"""A checkpoint of the no-op family for audio: a model_index.json and nothing else."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.parts import write_json


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    write_json(folder / "model_index.json", {"_class_name": "NoopAudioPipeline", "seed": seed})
