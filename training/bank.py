"""A bank of training examples that lives on the training device: recipes, token rows, and cached latents.

Letters in shapes: N examples, L tokens, C latent channel, H and W in latents (a quarter of the pixels).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from training import tokens
from training.captions import Author
from training.compose import Composer
from training.sprites import Sprites

CHUNK = 2048  # pictures of 64×64 encoded at a time


@dataclass(frozen=True)
class Texts:
    """Recipes ``[N, 5]`` and int16 token rows ``[N + 1, L]`` of their captions; the last is that of ""."""

    recipes_N5: Tensor
    t5_NL: Tensor
    clip_NL: Tensor

    def __len__(self) -> int:
        return len(self.recipes_N5)


@dataclass(frozen=True)
class Bank:
    """Examples of one picture size with normalised float16 latents ``[N, C, H, W]``."""

    size: int
    texts: Texts
    latents_NCHW: Tensor


def colourable(sprites: Sprites) -> list[list[bool]]:
    """Which emoji, in which style, have one hue to change."""
    mask: list[list[bool]] = (~sprites.hues_SN.isnan()).tolist()
    return mask


def write_captions(sprites: Sprites, count: int, seed: int) -> list[str]:
    """Captions alone, to train tokenizers on; every name and alias is among them."""
    author = Author(sprites.emoji, colourable(sprites), seed)
    listed = [name for e in sprites.emoji for name in (e.name, *e.aliases)]
    return listed + [author.draw().caption for _ in range(count)]


def write_texts(sprites: Sprites, tokenizers: Path, count: int, seed: int, device: torch.device) -> Texts:
    """Draws ``count`` recipes and tokenises their captions, and "" after them."""
    author = Author(sprites.emoji, colourable(sprites), seed)
    drawn = [author.draw() for _ in range(count)]
    captions = [recipe.caption for recipe in drawn] + [""]
    clip, t5 = tokens.load(tokenizers)
    recipes = torch.tensor([recipe.numbers for recipe in drawn], device=device)
    t5_rows, clip_rows = (torch.from_numpy(tokens.rows(t, captions)).to(device) for t in (t5, clip))
    return Texts(recipes, t5_rows, clip_rows)


@torch.no_grad()
def latents_of(vae: AutoencoderKL, composer: Composer, recipes_N5: Tensor, size: int) -> Tensor:
    """Raw latent means ``[N, C, size/4, size/4]`` in float16."""
    parts = []
    for rows in torch.split(recipes_N5, CHUNK * 64 * 64 // (size * size)):
        pictures = composer.draw(rows, size)
        with torch.autocast(pictures.device.type, torch.bfloat16, enabled=pictures.is_cuda):
            parts.append(vae.encode(pictures).latent_dist.mode().half())
    return torch.cat(parts)


def build(vae: AutoencoderKL, composer: Composer, texts: Texts, size: int) -> Bank:
    """Caches the normalised latents of all recipes at one size."""
    raw = latents_of(vae, composer, texts.recipes_N5, size)
    raw.sub_(vae.config.shift_factor).mul_(vae.config.scaling_factor)
    return Bank(size, texts, raw)


def split(texts: Texts, counts: Sequence[int]) -> list[Texts]:
    """Cuts the texts into parts of the given lengths, each with the row of "" at its end."""
    parts, start = [], 0
    for n in counts:
        rows = torch.cat([torch.arange(start, start + n), torch.tensor([len(texts)])])
        rows = rows.to(texts.t5_NL.device)
        parts.append(Texts(texts.recipes_N5[start : start + n], texts.t5_NL[rows], texts.clip_NL[rows]))
        start += n
    return parts
