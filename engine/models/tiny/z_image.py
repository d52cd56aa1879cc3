"""A tiny Z-Image."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.parts import CHAT, bpe_tokenizer, qwen3, save, vae


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    tokenizer = bpe_tokenizer(chat_template=CHAT)
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=[4, 6, 6],
        axes_lens=[514, 256, 256],
    )
    parts = {
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
        "vae": vae(),
        "text_encoder": qwen3(len(tokenizer)),
        "tokenizer": tokenizer,
        "transformer": transformer,
    }
    save(ZImagePipeline, parts, folder, seed)
