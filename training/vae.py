"""Trains the autoencoder on composed pictures: absolute and edge error, and a small pull to a unit Gaussian.

Letters in shapes: B batch, C channel, H height, W width. Pictures are in -1..1.
"""

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor

from training.bank import latents_of
from training.compose import Composer
from training.schedule import Average, Clock, Log, optimiser, set_rate

EDGE_WEIGHT = 1.0
KL_WEIGHT = 4e-4
EVERY_LARGE = 4  # every fourth batch has 128×128 pictures, a quarter as many


def train(
    vae: AutoencoderKL, composer: Composer, recipes_N5: Tensor, seconds: float, batch: int, log: Log
) -> None:
    """Trains in place for ``seconds``; leaves the averaged weights and sets the latents' scale and shift."""
    device = recipes_N5.device
    clock, average = Clock(seconds, peak=2e-3), Average(vae, 0.998)
    optimizer = optimiser(vae, fused=device.type == "cuda")
    for step in clock.ticks():
        large = step % EVERY_LARGE == EVERY_LARGE - 1
        size, count = (128, max(1, batch // 4)) if large else (64, batch)
        rows = recipes_N5[torch.randint(len(recipes_N5), (count,), device=device)]
        loss, error = losses(vae, composer.draw(rows, size))
        set_rate(optimizer, clock.rate)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        average.update(step)
        if step % 200 == 0:
            log.add(step=step, seconds=clock.elapsed, loss=loss.item(), absolute_error=error.item())
    average.into(vae)
    normalise(vae, composer, recipes_N5[:4096])


def losses(vae: AutoencoderKL, pictures_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """The whole loss, and the absolute error alone (in units of the -1..1 range)."""
    with torch.autocast(pictures_BCHW.device.type, torch.bfloat16, enabled=pictures_BCHW.is_cuda):
        posterior = vae.encode(pictures_BCHW).latent_dist
        drawn = vae.decode(posterior.sample()).sample.float()
    error = (drawn - pictures_BCHW).abs().mean()
    edges = sum(F.l1_loss(drawn.diff(dim=d), pictures_BCHW.diff(dim=d)) for d in (2, 3))
    mean, logvar = posterior.mean.float(), posterior.logvar.float()
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    return error + EDGE_WEIGHT * edges + KL_WEIGHT * kl, error


def normalise(vae: AutoencoderKL, composer: Composer, recipes_N5: Tensor) -> None:
    """Records the shift and scale that give latents mean 0 and deviation 1."""
    raw = latents_of(vae, composer, recipes_N5, 64).float()
    vae.register_to_config(shift_factor=raw.mean().item(), scaling_factor=1 / raw.std().item())
    spread = ", ".join(f"{v:.2f}" for v in raw.std((0, 2, 3)).tolist())
    print(f"latents: mean {raw.mean():.3f}, deviation {raw.std():.3f}; by channel {spread}", flush=True)


@torch.no_grad()
def rebuild_error(vae: AutoencoderKL, composer: Composer, recipes_N5: Tensor, size: int) -> float:
    """Root mean square error of encode and decode, in 0..1 pixel units."""
    pictures = composer.draw(recipes_N5, size)
    drawn = vae.decode(vae.encode(pictures).latent_dist.mode()).sample.clamp(-1, 1)
    error: Tensor = (drawn - pictures) / 2
    return error.square().mean().sqrt().item()
