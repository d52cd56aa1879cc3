"""Text encoder and transformer of Doodle: plain torch, which knows nothing of Saggar."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """The content of doodle.json. `vocabulary` and `longest` count tokens; `patch` is in latent pixels."""

    channels: int = 4
    width: int = 32
    heads: int = 2
    blocks: int = 2
    patch: int = 2
    vocabulary: int = 48
    longest: int = 64


class TextEncoder(nn.Module):
    """One vector a token. A text is encoded for itself: there is no padding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.place = nn.Embedding(config.longest, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[texts, tokens] of int64 to [texts, tokens, width]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        encoded: torch.Tensor = self.out(self.norm(self.token(tokens) + self.place(places)))
        return encoded


class Attention(nn.Module):
    """Of `x` over `context`, where `mask` is true."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor, context: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[rows, n, width] and [rows, m, width], mask [rows, m], to [rows, n, width]."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(x), self.key(context), self.value(context))
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Image tokens look at one another and at the text; time scales and shifts what goes in."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.modulation = nn.Linear(width, 2 * width)
        self.attention = Attention(width, config.heads)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(
        self, x: torch.Tensor, text: torch.Tensor, mask: torch.Tensor, time: torch.Tensor
    ) -> torch.Tensor:
        """Image tokens [rows, n, width] to the same; text and mask as in `Attention`; time [rows, width]."""
        scale, shift = self.modulation(time)[:, None].chunk(2, dim=-1)
        normed = functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        image = mask.new_ones(mask.shape[0], x.shape[1])
        x = x + self.attention(normed, torch.cat([normed, text], 1), torch.cat([image, mask], 1))
        out: torch.Tensor = x + self.feed(functional.layer_norm(x, x.shape[-1:]))
        return out


class Denoiser(nn.Module):
    """The velocity of noisy latents. Rows may differ in everything but their size."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        cell = config.channels * config.patch**2
        self.first = nn.Linear(cell, config.width)
        self.time = nn.Sequential(
            nn.Linear(config.width, config.width), nn.SiLU(), nn.Linear(config.width, config.width)
        )
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.last = nn.Linear(config.width, cell)

    def forward(
        self, latents: torch.Tensor, time: torch.Tensor, text: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Latents [rows, channels, h, w], time [rows] from 1 (noise) to 0 (picture), text [rows, tokens, width], its
        mask [rows, tokens] with true for real tokens: velocity [rows, channels, h, w].
        """
        patch, (high, wide) = self.config.patch, latents.shape[-2:]
        cells = functional.pixel_unshuffle(latents, patch).flatten(2).transpose(1, 2)
        x = self.first(cells) + waves(
            torch.arange(cells.shape[1], device=cells.device), latents, self.config.width
        )
        moment = self.time(waves(1000 * time, latents, self.config.width))
        for block in self.blocks:
            x = block(x, text, mask, moment)
        cells = self.last(functional.layer_norm(x, x.shape[-1:])).transpose(1, 2)
        return functional.pixel_shuffle(cells.unflatten(2, (high // patch, wide // patch)), patch)


def waves(values: torch.Tensor, like: torch.Tensor, width: int) -> torch.Tensor:
    """Numbers [n] as sines and cosines [n, width], computed in float32, of the dtype of `like`."""
    speeds = torch.exp(torch.arange(width // 2, device=like.device) * (-math.log(1e4) / (width // 2)))
    angles = values.to(like.device, torch.float32)[:, None] * speeds
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(like.dtype)
