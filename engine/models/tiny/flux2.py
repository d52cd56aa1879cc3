"""A tiny FLUX.2 dev. Its encoder has as many layers as the pipeline looks at, and no processor for images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from saggar.engine.models.tiny.parts import bpe_tokenizer, flux2_parts, save

_CHAT = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content[0].text }}"
    "[/{{ message.role }}]{% endfor %}"
)


def build(folder: Path, seed: int) -> None:
    """Write it into `folder`."""
    from diffusers import Flux2Pipeline
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

    tokenizer = bpe_tokenizer(f"{SYSTEM_MESSAGE}[system][/system][user]", _CHAT, padding_side="left")
    parts = flux2_parts(_text_encoder(len(tokenizer)), tokenizer, seed, guidance_embeds=True)
    save(Flux2Pipeline, parts, folder, seed)


def _text_encoder(vocabulary: int) -> Any:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    text = {
        "model_type": "mistral",
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 37,
        "num_hidden_layers": 30,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision))
