"""Doodle without Saggar: one picture at a time in a plain loop. What the engine makes is compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from saggar_doodle.model import Denoiser, TextEncoder

SHIFT = 1.5


@dataclass(frozen=True)
class Plain:
    """The modules as they were before they became files, and their tokenizer."""

    text: TextEncoder
    denoiser: Denoiser
    vae: Any
    tokenizer: Any

    @torch.inference_mode()
    def draw(
        self,
        prompt: str,
        negative: str,
        seed: int,
        steps: int,
        guidance: float,
        size: Sequence[int] = (64, 64),
    ) -> np.ndarray:
        """A picture H×W×3 of float32 in 0..1."""
        factor = 2 ** (len(self.vae.config.block_out_channels) - 1)
        shape = (1, self.denoiser.config.channels, size[0] // factor, size[1] // factor)
        latents = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed))
        levels = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        levels = SHIFT * levels / (1 + (SHIFT - 1) * levels)
        for now, then in pairwise(levels):
            velocity = self._velocity(latents, now, prompt)
            if guidance > 1:
                away = self._velocity(latents, now, negative)
                velocity = away + guidance * (velocity - away)
            latents = latents + float(then - now) * velocity
        picture = self.vae.decode(latents / self.vae.config.scaling_factor).sample[0]
        pixels: np.ndarray = (picture / 2 + 0.5).clamp(0, 1).permute(1, 2, 0).numpy()
        return pixels

    def _velocity(self, latents: torch.Tensor, level: torch.Tensor, prompt: str) -> torch.Tensor:
        tokens = [self.tokenizer.bos_id(), *self.tokenizer.encode(prompt)][: self.text.place.num_embeddings]
        text = self.text(torch.tensor([tokens]))
        velocity: torch.Tensor = self.denoiser(
            latents, level[None].float(), text, torch.ones(1, len(tokens)) > 0
        )
        return velocity
