"""What tiny Qwen-Images of all kinds share: the encoder of texts and pictures, its processor, the transformer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saggar.engine.models.tiny.parts import CHAT, SIZE, bpe_tokenizer, save, video_vae

PICTURES = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Tokens that stand for pictures in Qwen's texts."""
DESCRIBE = (
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships"
    " of the objects and background:user"
)
"""Words of a pipeline's template, a token each: pipelines cut off as many tokens as the real tokenizer makes."""
EDIT = (
    "system\nDescribe the key features of the input image (color, shape, size, texture, objects, background), then"
    " explain how the user's text instruction should alter or modify the image. Generate a new image that meets the"
    " user's requirements while maintaining consistency with the original input where appropriate.user"
)
"""The same of the pipelines that edit."""


def build_qwen_image(
    folder: Path,
    seed: int,
    kind: str,
    words: str,
    defaults: Mapping[str, Any] | None = None,
    text: str | None = "max_sequence_length",
    vae: Any = None,
    size: int | None = SIZE,
    **transformer: Any,
) -> None:
    """Write one of this pipeline, with a processor of pictures unless it is the plain one."""
    import diffusers

    pictures = kind != "QwenImagePipeline"
    tokenizer = bpe_tokenizer(words=words, special=PICTURES if pictures else ())
    config = {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "axes_dims_rope": (4, 4, 8),
    }
    parts = {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(
            shift=3.0, use_dynamic_shifting=True, shift_terminal=0.02
        ),
        "vae": vae or video_vae(),
        "text_encoder": qwen_vl(tokenizer),
        "tokenizer": tokenizer,
        "transformer": diffusers.QwenImageTransformer2DModel(**(config | transformer)),
        **({"processor": qwen_processor(tokenizer)} if pictures else {}),
    }
    index = {"processor": ["transformers", "Qwen2VLProcessor"]} if pictures else None
    save(getattr(diffusers, kind), parts, folder, seed, text=text, defaults=defaults, size=size, index=index)


def qwen_vl(tokenizer: Any) -> Any:
    """Qwen2.5-VL, which reads texts and pictures."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": len(tokenizer),
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
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>"}
    known = tokenizer.get_vocab()
    ids = {f"{name}_token_id": known[token] for name, token in names.items() if token in known}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))


def qwen_processor(tokenizer: Any) -> Any:
    """Of its texts with pictures, which become at most 16 tokens each."""
    from saggar.engine.models.source.qwen_processor import PictureProcessor
    from transformers import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28}
    return PictureProcessor(Qwen2VLImageProcessorPil(size=size), tokenizer, chat_template=CHAT)
