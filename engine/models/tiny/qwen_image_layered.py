"""A tiny Qwen-Image-Layered: its pictures have as many pixels as 64×64."""

from __future__ import annotations

import json
from pathlib import Path

from saggar.engine.models.tiny.parts import SIZE, video_vae, write_json
from saggar.engine.models.tiny.qwen_parts import DESCRIBE, build_qwen_image


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    build_qwen_image(
        folder,
        seed,
        "QwenImageLayeredPipeline",
        DESCRIBE,
        {"layers": 2},
        # Of as many channels as a picture has, latents would be taken for one.
        vae=video_vae(input_channels=4, z_dim=8, latents_mean=[0.1, -0.2] * 4, latents_std=[1.5, 0.8] * 4),
        in_channels=32,
        out_channels=8,
        size=None,
        use_additional_t_cond=True,
        use_layer3d_rope=True,
    )
    settings = json.loads((folder / "saggar.json").read_text(encoding="utf-8"))
    settings["params"]["resolution"] = {"default": SIZE, "enum": [SIZE, 96]}
    write_json(folder / "saggar.json", settings)
