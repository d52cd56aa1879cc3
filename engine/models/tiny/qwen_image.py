"""A tiny Qwen-Image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from saggar.engine.models.tiny.parts import bpe_tokenizer, save, video_vae

_TEMPLATE = (
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships"
    " of the objects and background:user"
)
"""Words of the pipeline's template, a token each: the pipeline cuts off as many tokens as the real tokenizer makes."""


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline, QwenImageTransformer2DModel

    tokenizer = bpe_tokenizer(words=_TEMPLATE)
    transformer = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    parts = {
        "scheduler": FlowMatchEulerDiscreteScheduler(
            shift=3.0, use_dynamic_shifting=True, shift_terminal=0.02
        ),
        "vae": video_vae(),
        "text_encoder": _text_encoder(len(tokenizer)),
        "tokenizer": tokenizer,
        "transformer": transformer,
    }
    save(QwenImagePipeline, parts, folder, seed)


def _text_encoder(vocabulary: int) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 37,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [0],
    }
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))
