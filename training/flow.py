"""Trains transformer and text encoders together by flow matching on cached latents.

Letters in shapes: B batch, L tokens, C latent channel. Sigma is 0 at the picture, 1 at noise.
"""

from collections.abc import Sequence

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextModel, T5EncoderModel

from training.bank import Bank
from training.models import image_ids, pack
from training.schedule import Average, Clock, Log, optimiser, set_rate

CAPTION_DROPPED = 0.10
DECAY = 0.9995


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
        sigma = torch.randn(self.batch, device=self.device).sigmoid()
        noise = torch.randn_like(clean)
        noisy = clean + sigma[:, None, None] * (noise - clean)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            guess = flow(noisy, sigma, texts.t5_NL[words].long(), texts.clip_NL[words].long(), self.ids_L3)
        error: Tensor = guess.float() - (noise - clean)
        return error.square().mean()


def train(flow: Flow, banks: Sequence[tuple[Bank, int]], seconds: float, peak: float, log: Log) -> None:
    """Trains in place for ``seconds`` and leaves the averaged weights.

    ``banks`` are taken in turn, each with its batch size: one listed three times gets three batches in four.
    """
    samplers = [Sampler(bank, batch) for bank, batch in banks]
    clock, average = Clock(seconds, peak), Average(flow, DECAY)
    optimizer = optimiser(flow, fused=samplers[0].device.type == "cuda")
    recent: dict[int, Tensor] = {}
    seen = 0
    for step in clock.ticks(grace_steps=len(samplers)):
        sampler = samplers[step % len(samplers)]
        loss = sampler.loss(flow)
        set_rate(optimizer, clock.rate)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(average.live, 1.0)
        optimizer.step()
        average.update(step)
        seen += sampler.batch
        _remember(recent, sampler.bank.size, loss.detach())
        if step % 200 == 0:
            by_size = {f"loss_{size}": value.item() for size, value in recent.items()}
            log.add(step=step, seconds=clock.elapsed, samples=seen, rate=clock.rate, **by_size)
    average.into(flow)


def _remember(recent: dict[int, Tensor], size: int, loss: Tensor) -> None:
    """A running mean of the loss by picture size, kept on the device so that no step waits for it."""
    recent[size] = loss if size not in recent else recent[size].lerp(loss, 0.02)
