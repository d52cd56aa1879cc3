"""A tiny LTX-2.0, saved as its pipeline for pictures: texts with a mask, and a VAE that takes a timestep."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.ltx2 import write


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    connectors = {
        "audio_connector_num_attention_heads": 4,
        "video_connector_num_learnable_registers": None,
        "audio_connector_num_learnable_registers": None,
    }
    write("LTX2ImageToVideoPipeline", folder, seed, {}, connectors, {"timestep_conditioning": True})
