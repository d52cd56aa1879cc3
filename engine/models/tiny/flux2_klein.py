"""A tiny FLUX.2 klein base, with true guidance. Its encoder has as many layers as the pipeline looks at."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.models.tiny.parts import CHAT, bpe_tokenizer, flux2_parts, qwen3, save


def build(folder: Path, seed: int, is_distilled: bool = False) -> None:
    """Write it into `folder`."""
    from diffusers import Flux2KleinPipeline

    tokenizer = bpe_tokenizer(chat_template=CHAT)
    parts = flux2_parts(qwen3(len(tokenizer), layers=27), tokenizer, seed, guidance_embeds=False)
    save(Flux2KleinPipeline, parts, folder, seed, is_distilled=is_distilled)
