"""A tiny HunyuanVideo-1.5 for text. 16 pixels a latent pixel, 4 frames a latent frame, as the real one."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from saggar.engine.models.tiny.parts import CHAT, bpe_tokenizer, save, t5

WIDTH = 32
"""Of all tokens."""


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    from diffusers import HunyuanVideo15Pipeline

    write(HunyuanVideo15Pipeline, parts("t2v"), folder, seed)


def write(pipeline: Any, made: dict[str, Any], folder: Path, seed: int, **defaults: Any) -> None:
    """As `save`, with few frames."""
    usual = {"num_frames": 5, "num_inference_steps": 4}
    save(pipeline, made, folder, seed, text=None, defaults={**usual, **defaults})


def parts(task: str) -> dict[str, Any]:
    """The parts that both pipelines have."""
    from diffusers import (
        AutoencoderKLHunyuanVideo15,
        ClassifierFreeGuidance,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideo15Pipeline,
        HunyuanVideo15Transformer3DModel,
    )
    from transformers import ByT5Tokenizer

    tokenizer_2 = ByT5Tokenizer()
    encode = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters
    # A token for each word of the pipeline's page, of which it cuts off as many as the real tokenizer makes.
    tokenizer = bpe_tokenizer(words=encode["system_message"].default, chat_template=CHAT)
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 8, 16, 16), layers_per_block=1
    )
    transformer = HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=WIDTH,
        text_embed_2_dim=WIDTH,
        image_embed_dim=WIDTH,
        rope_axes_dim=(4, 6, 6),
        target_size=64,
        task_type=task,
    )
    return {
        "text_encoder": _text_encoder(len(tokenizer)),
        "tokenizer": tokenizer,
        "transformer": transformer,
        "vae": vae,
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
        "text_encoder_2": t5(WIDTH, len(tokenizer_2)),
        "tokenizer_2": tokenizer_2,
        "guider": ClassifierFreeGuidance(guidance_scale=6.0),
    }


def _text_encoder(vocabulary: int) -> Any:
    """The pipeline takes what comes before the last two layers."""
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    config = Qwen2_5_VLTextConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=37,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    )
    return Qwen2_5_VLTextModel(config)
