"""Trains transformer and text encoders together by flow matching on cached latents.

Letters in shapes: B batch, L tokens, C latent channel. Sigma is 0 at the picture, 1 at noise.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextModel, T5EncoderModel

from training.bank import Bank
from training.models import image_ids, pack
from training.schedule import Clock, Log
from training.steps import Steps

CAPTION_DROPPED = 0.10
UNIFORM_SIGMAS = 0.15
DECAY = 0.9995
SMALL_TURNS = 3
LOG_EVERY = 250


class Flow(nn.Module):
    """The three modules that are trained together; predicts noise minus picture."""

    def __init__(self, transformer: FluxTransformer2DModel, t5: T5EncoderModel, clip: CLIPTextModel) -> None:
        super().__init__()
        self.transformer, self.t5, self.clip = transformer, t5, clip

    def forward(
        self, noisy_BLC: Tensor, sigma_B: Tensor, t5_BL: Tensor, clip_BL: Tensor, ids_L3: Tensor
    ) -> Tensor:
        """Velocity ``[B, L, C]`` of packed latents, called as the pipeline calls it."""
        states = self.t5(t5_BL)[0]
        summary = self.clip(clip_BL).pooler_output
        velocity: Tensor = self.transformer(
            hidden_states=noisy_BLC,
            timestep=sigma_B,
            guidance=None,
            pooled_projections=summary,
            encoder_hidden_states=states,
            txt_ids=torch.zeros(t5_BL.shape[1], 3, device=noisy_BLC.device),
            img_ids=ids_L3,
            return_dict=False,
        )[0]
        return velocity


class Sampler:
    """Draws training batches from a bank: examples, noise, sigmas, dropped captions."""

    def __init__(self, bank: Bank, batch: int) -> None:
        self.bank, self.batch = bank, batch
        self.device = bank.latents_NCHW.device
        side = bank.size // 4
        self.ids_L3 = image_ids(side, side, self.device)

    def loss(self, flow: Flow) -> Tensor:
        """Mean square error of the predicted velocity for one random batch."""
        texts = self.bank.texts
        rows = torch.randint(len(texts), (self.batch,), device=self.device)
        clean = pack(self.bank.latents_NCHW[rows].float())
        dropped = torch.rand(self.batch, device=self.device) < CAPTION_DROPPED
        words = torch.where(dropped, len(texts), rows)  # the row after the last is ""
        sigma = self._sigmas()
        noise = torch.randn_like(clean)
        noisy = clean + sigma[:, None, None] * (noise - clean)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            guess = flow(noisy, sigma, texts.t5_NL[words].long(), texts.clip_NL[words].long(), self.ids_L3)
        error: Tensor = guess.float() - (noise - clean)
        return error.square().mean()

    def _sigmas(self) -> Tensor:
        """Mostly logit-normal, which favours the middle; some uniform, for the ends that sampling starts from."""
        even = torch.rand(self.batch, device=self.device)
        middle = torch.randn(self.batch, device=self.device).sigmoid()
        return torch.where(torch.rand(self.batch, device=self.device) < UNIFORM_SIGMAS, even, middle)


def train(
    flow: Flow,
    banks: Sequence[tuple[Bank, int]],
    seconds: float,
    peak: float,
    log: Log,
    save: Callable[[], None],
) -> None:
    """Trains in place for ``seconds``, leaves the averaged weights, and saves them.

    ``banks`` come with their batch sizes; the first is drawn from ``SMALL_TURNS`` times as often as the second.
    """
    steps = Steps(flow, DECAY)
    samplers = [Sampler(bank, batch) for bank, batch in banks]
    turns = [(sampler, steps.record(partial(sampler.loss, flow))) for sampler in samplers]
    turns = [turns[0]] * SMALL_TURNS + turns[1:]
    clock = Clock(seconds, peak)
    recent: dict[int, Tensor] = {}
    seen = 0
    for step in clock.ticks():
        sampler, make = turns[step % len(turns)]
        steps.set_rate(clock.rate)
        loss = make()
        steps.average(step)
        seen += sampler.batch
        _remember(recent, sampler.bank.size, loss)
        if step % LOG_EVERY == 0:
            by_size = {f"loss_{size}": value.item() for size, value in recent.items()}
            log.add(step=step, seconds=clock.elapsed, samples=seen, rate=clock.rate, **by_size)
    steps.settle()
    save()


def _remember(recent: dict[int, Tensor], size: int, loss: Tensor) -> None:
    """A running mean of the loss by picture size, kept on the device so that no step waits for it."""
    recent[size] = loss.clone() if size not in recent else recent[size].lerp(loss, 0.02)
