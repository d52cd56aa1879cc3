"""A tiny Ovis-Image."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.parts import CHAT, bpe_tokenizer, qwen3, save, vae

_TEMPLATE = (
    "user\nDescribe the image by detailing the color, quantity, text, shape, size, texture, spatial relationships of"
    " the objects and background: assistant"
)
"""Words that the pipeline puts before a prompt, a token each: it cuts off as many as the real tokenizer makes."""


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, OvisImagePipeline, OvisImageTransformer2DModel

    tokenizer = bpe_tokenizer(words=_TEMPLATE, chat_template=CHAT)
    transformer = OvisImageTransformer2DModel(
        in_channels=16,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    parts = {
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        "vae": vae(),
        "text_encoder": qwen3(len(tokenizer)).model,
        "tokenizer": tokenizer,
        "transformer": transformer,
    }
    save(OvisImagePipeline, parts, folder, seed)
