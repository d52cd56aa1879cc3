"""The verbs that families over a diffusers pipeline share. Imports torch only when a verb is called."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar

from saggar.engine.cache.prompt import Encoded, Known, PromptCache
from saggar.engine.media import Media
from saggar.engine.models.base import Family, grouped
from saggar.engine.models.reading import Reading
from saggar.engine.models.source.checkpoint import Checkpoint
from saggar.engine.models.state import RequestState
from saggar.engine.params import Narrowing
from saggar.engine.request import TextCut

if TYPE_CHECKING:
    import numpy as np
    import torch
    from saggar.engine.platform.base import Placement

P = TypeVar("P")
V = TypeVar("V", bound=Hashable)
Text: TypeAlias = Literal["prompt", "negative_prompt"]
_DECODERS = ("vae", "audio_vae")
_DENOISERS = ("transformer", "transformer_2", "unet")


class DrawnParams(Protocol):
    """What most pipelines of pictures have in common."""

    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def num_inference_steps(self) -> int: ...


class TorchFamily(Family["torch.Tensor", P, Any]):
    """`pipeline` is the class in diffusers whose parts the family uses; they are `self._pipe` once loaded.
    `loaded_as`: for a component, the class of its library that the family loads in place of the checkpoint's.
    `readers`: the tokenizers that are given the whole text; all of them if none are named.
    """

    pipeline: str
    loaded_as: ClassVar[Mapping[str, str]] = {}
    readers: ClassVar[tuple[str, ...]] = ()

    def narrowings(self) -> tuple[Narrowing, ...]:
        """A schedule that is stretched to its end has two steps: with one, diffusers divides nothing by nothing."""
        has_one = "scheduler" in self.checkpoint.components
        stretched = has_one and self.checkpoint.config("scheduler").get("shift_terminal")
        return ({"num_inference_steps": {"minimum": 2}} if stretched else {}, *super().narrowings())

    def load(self, placement: Placement) -> None:
        """The pipeline's parts on the rank's device."""
        from saggar.engine.models.source.loading import load_pipeline

        self.keep(load_pipeline(self.pipeline, self.checkpoint, placement, self.loaded_as), placement)

    def keep(self, parts: Any, placement: Placement) -> None:
        """The end of `load`: `parts` are `self._pipe` from now on.

        A family that loads its model itself hands over an object with `vae`, and with `components`, a dictionary:
        what has "tokenizer" in its name is called with a text and gives {"input_ids": ...}, for `probe`.
        """
        self._pipe: Any = parts
        self._placement = placement
        self._prompts = PromptCache(placement.prompt_cache_bytes)
        self._reading = Reading(parts.components, self.readers)

    def step_scheduler(self, state: RequestState[torch.Tensor, P, Any], noise: torch.Tensor) -> None:
        """The request's own sampler."""
        from saggar.engine.models.common import step

        step(state, noise)

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """torch.cat."""
        from saggar.engine.models.common import join

        return join(pieces)

    def denoisers(self) -> Mapping[str, torch.nn.Module]:
        """The pipeline's transformers, or its UNet."""
        found = {name: getattr(self._pipe, name, None) for name in _DENOISERS}
        return {name: module for name, module in found.items() if module is not None}

    def decoders(self) -> Mapping[str, torch.nn.Module]:
        """The pipeline's VAEs."""
        found = {name: getattr(self._pipe, name, None) for name in _DECODERS}
        return {name: module for name, module in found.items() if module is not None}

    def probe(self) -> dict[str, str]:
        """Tokens of a probe prompt, and the first noise of a seed."""
        from saggar.engine.models.common import probe

        return probe(self._pipe)

    def finite(self, state: RequestState[torch.Tensor, P, Any]) -> object:
        """On the device: nothing waits for it before it is read."""
        assert state.latents is not None
        return state.latents.isfinite().all()

    def images(self, state: RequestState[torch.Tensor, P, Any]) -> torch.Tensor:
        """The latents as the VAE takes them, [outputs, channels, h, w]; of each output as many as it has pictures."""
        assert state.latents is not None
        return state.latents

    def post_decode(self, states: Sequence[RequestState[torch.Tensor, P, Any]]) -> Sequence[Sequence[Media]]:
        """Decode together what is of one size."""
        from saggar.engine.models.common import join, split, to_pixels

        images = {state.id: self.images(state) for state in states}
        arrays: dict[str, list[np.ndarray]] = {}
        for group in grouped(states, lambda state: str(images[state.id].shape[1:])):
            pictures = self.decode(self.unscale(join([images[state.id] for state in group])))
            pixels = to_pixels(self.finish(pictures, group[0].params), self._placement.pixels)
            counts = [len(images[state.id]) for state in group]
            arrays.update(zip((state.id for state in group), split(pixels, counts), strict=True))
        return [arrays[state.id] for state in states]

    def unscale(self, latents: torch.Tensor) -> torch.Tensor:
        """From the scale of the denoiser to that of the VAE."""
        config = self._pipe.vae.config
        return latents / config.scaling_factor + config.shift_factor  # type: ignore[no-any-return]

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents of the VAE's scale to pictures [n, 3, H, W] in -1..1."""
        return self._pipe.vae.decode(latents, return_dict=False)[0]  # type: ignore[no-any-return]

    def finish(self, pictures: torch.Tensor, params: P) -> torch.Tensor:
        """Hook: what the pipeline does to decoded pictures [n, 3, H, W], which are of one key."""
        return pictures

    def preview(self, state: RequestState[torch.Tensor, P, Any]) -> np.ndarray | None:
        """A mixture of the latent channels of the first output."""
        from saggar.engine.models.common import rgb_preview

        return rgb_preview(self.images(state)[0])

    def condition(
        self,
        states: Sequence[RequestState[torch.Tensor, P, Any]],
        encode: Callable[[list[str]], Sequence[Encoded]],
        variant: object = "",
    ) -> None:
        """Hand each branch of each request its encoded text.

        `encode` is asked once for the texts that are not known yet, each once, and gives for each its tensors of
        shape [1, ...] by name. `variant` is what the encoding depends on besides the text.
        """
        self.condition_each(states, lambda texts, _: encode(texts), lambda state, branch: variant)

    def condition_each(
        self,
        states: Sequence[RequestState[torch.Tensor, P, Any]],
        encode: Callable[[list[str], V], Sequence[Encoded]],
        variant: Callable[[RequestState[torch.Tensor, P, Any], str], V],
    ) -> None:
        """The same where requests or branches are encoded in different ways: `variant` names the way of a
        branch, and `encode` is asked once for each.
        """
        texts: dict[V, dict[str, None]] = {}
        for state in states:
            for branch in self.branches(state):
                texts.setdefault(variant(state, branch), {})[self.text_of(state, branch)] = None
        known = {how: self._encoded(list(some), how, encode) for how, some in texts.items()}
        for state in states:
            state.unread = {}
            for branch in self.branches(state):
                found = known[variant(state, branch)][self.text_of(state, branch)]
                state.conditioning[branch] = found.encoded
                if found.cut is not None:
                    state.unread[self.field_of(branch)] = found.cut

    def field_of(self, branch: str) -> Text:
        """Hook: whose text a branch has, any but `cond` that of the negative prompt."""
        return "prompt" if branch == "cond" else "negative_prompt"

    def text_of(self, state: RequestState[torch.Tensor, P, Any], branch: str) -> str:
        """The text of a branch."""
        request = state.request
        return request.prompt if self.field_of(branch) == "prompt" else request.negative_prompt or ""

    def cuts(self, texts: Sequence[str], how: Any) -> Sequence[TextCut | None]:
        """Hook: of each text that has just been encoded in this way, what its encoders leave out. A family whose
        tokenizer is none of transformers' counts by itself.
        """
        return self._reading.cuts(texts, self.kept(how))

    def kept(self, how: Any) -> int | None:
        """Hook: how many of a text's tokens and its template's are read, where it is not the tokenizer that cuts."""
        return None

    def _encoded(
        self, texts: list[str], how: V, encode: Callable[[list[str], V], Sequence[Encoded]]
    ) -> dict[str, Known]:
        known: dict[str, Known] = {}
        for text in texts:
            if (entry := self._prompts.get(text, str(how))) is not None:
                known[text] = entry
        fresh = [text for text in texts if text not in known]
        self.count("prompts.cached", len(known))
        self.count("prompts.encoded", len(fresh))
        for text, new in zip(fresh, self._read(fresh, how, encode) if fresh else (), strict=True):
            self._prompts.put(text, str(how), *new)
            known[text] = new
        return known

    def _read(
        self, texts: list[str], how: V, encode: Callable[[list[str], V], Sequence[Encoded]]
    ) -> list[Known]:
        with self._reading.noting():
            made = encode(texts, how)
        found = [Known(*one) for one in zip(made, self.cuts(texts, how), strict=True)]
        self.count("prompts.cut", sum(one.cut is not None for one in found))
        return found


def per_text(**tensors: torch.Tensor) -> list[Encoded]:
    """Tensors of shape [texts, ...] by name, as `condition` wants them."""
    count = len(next(iter(tensors.values())))
    return [{name: value[i : i + 1] for name, value in tensors.items()} for i in range(count)]


def text_length(checkpoint: Checkpoint, tokenizer: str, usual: int, longest: int = 512) -> dict[str, Any]:
    """Schema words of `max_sequence_length`: a tokenizer made for less rules, its model saw nothing longer."""
    if checkpoint.components.get(tokenizer) is not None:
        longest = min(longest, int(str(checkpoint.config(tokenizer).get("model_max_length", longest))))
    return {"default": min(usual, longest), "maximum": longest}


def vae_factor(config: Mapping[str, Any]) -> int:
    """Pixels a latent pixel, along one side, from the VAE's configuration, an image's or a video's."""
    if "temperal_downsample" in config:
        return int(2 ** len(config["temperal_downsample"]))
    return int(2 ** (len(config["block_out_channels"]) - 1))
