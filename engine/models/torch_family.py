"""The verbs that families over a diffusers text-to-image pipeline share. Imports torch only when a verb is
called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from saggar.engine.models.base import Family
from saggar.engine.models.checkpoint import Checkpoint
from saggar.engine.models.state import RequestState

if TYPE_CHECKING:
    import numpy as np
    import torch
    from saggar.engine.platform.base import Placement

P = TypeVar("P")


class TorchFamily(Family["torch.Tensor", P, Any]):
    """`pipeline` is the class in diffusers whose parts the family uses; they are `self._pipe` once loaded."""

    pipeline: ClassVar[str]

    def load(self, placement: Placement) -> None:
        """The pipeline's parts on the rank's device."""
        from saggar.engine.models.common import load_pipeline

        self._pipe: Any = load_pipeline(self.pipeline, self.checkpoint, placement)
        self._placement = placement

    def step_scheduler(self, state: RequestState[torch.Tensor, P, Any], noise: torch.Tensor) -> None:
        """The request's own sampler."""
        from saggar.engine.models.common import step

        step(state, noise)

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """torch.cat."""
        from saggar.engine.models.common import join

        return join(pieces)

    def probe(self) -> dict[str, str]:
        """Tokens of a probe prompt, and the first noise of a seed."""
        from saggar.engine.models.common import probe

        return probe(self._pipe)

    def finite(self, state: RequestState[torch.Tensor, P, Any]) -> object:
        """On the device: nothing waits for it before it is read."""
        assert state.latents is not None
        return state.latents.isfinite().all()

    def images(self, state: RequestState[torch.Tensor, P, Any]) -> torch.Tensor:
        """The latents as the VAE takes them, [outputs, channels, h, w]."""
        assert state.latents is not None
        return state.latents

    def post_decode(self, states: Sequence[RequestState[torch.Tensor, P, Any]]) -> list[list[np.ndarray]]:
        """Decode together; requests of one key share their size."""
        from saggar.engine.models.common import split, to_pixels

        vae = self._pipe.vae
        latents = self.join([self.images(state) for state in states])
        pictures = vae.decode(
            latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False
        )[0]
        return split(to_pixels(pictures, self._placement.pixels), states)

    def preview(self, state: RequestState[torch.Tensor, P, Any]) -> np.ndarray:
        """A mixture of the latent channels of the first output."""
        from saggar.engine.models.common import rgb_preview

        return rgb_preview(self.images(state)[0])

    def texts(self, states: Sequence[RequestState[torch.Tensor, P, Any]]) -> list[str]:
        """The texts that the requests' branches need, each once: equal ones are encoded once."""
        found = [_text(state, branch) for state in states for branch in self.branches(state)]
        return list(dict.fromkeys(found))

    def condition(
        self,
        states: Sequence[RequestState[torch.Tensor, P, Any]],
        texts: Sequence[str],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """Hand each branch its rows of the encoded texts, by name; `tensors` have shape [texts, ...]."""
        for state in states:
            for branch in self.branches(state):
                at = texts.index(_text(state, branch))
                state.conditioning[branch] = {name: value[at : at + 1] for name, value in tensors.items()}


def text_length(checkpoint: Checkpoint, tokenizer: str, usual: int, longest: int = 512) -> dict[str, Any]:
    """Schema words of `max_sequence_length`: a tokenizer made for less rules, its model saw nothing longer."""
    if checkpoint.components.get(tokenizer) is not None:
        longest = min(longest, int(str(checkpoint.config(tokenizer).get("model_max_length", longest))))
    return {"default": min(usual, longest), "maximum": longest}


def vae_factor(config: Mapping[str, Any]) -> int:
    """Pixels a latent pixel, along one side, from the VAE's configuration."""
    return int(2 ** (len(config["block_out_channels"]) - 1))


def _text(state: RequestState[torch.Tensor, Any, Any], branch: str) -> str:
    return state.request.prompt if branch == "cond" else state.request.negative_prompt or ""
