"""Trains the autoencoder on composed pictures: absolute and edge error, and a small pull to a unit Gaussian.

Letters in shapes: B batch, C channel, H height, W width. Pictures are in -1..1.
"""

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor

from training.bank import latents_of
from training.compose import Composer
from training.schedule import Clock, Log
from training.steps import Loss, Steps

EDGE_WEIGHT = 1.0
KL_WEIGHT = 4e-4
PEAK = 2e-3
DECAY = 0.998
LARGE_EVERY = 4  # every fourth batch has 128×128 pictures, a quarter as many


class Trial:
    """One batch size at one picture size: a fixed place for the pictures, and the step recorded on it."""

    def __init__(self, vae: AutoencoderKL, steps: Steps, size: int, batch: int, device: torch.device) -> None:
        self.size, self.batch = size, batch
        self.pictures_BCHW = torch.rand(batch, 3, size, size, device=device) * 2 - 1
        self.step: Loss = steps.record(lambda: loss_of(vae, self.pictures_BCHW))

    def run(self, composer: Composer, recipes_N5: Tensor) -> Tensor:
        """Draws random recipes, makes one step, returns the loss."""
        rows = torch.randint(len(recipes_N5), (self.batch,), device=recipes_N5.device)
        self.pictures_BCHW.copy_(composer.draw(recipes_N5[rows], self.size))
        return self.step()


def train(
    vae: AutoencoderKL, composer: Composer, recipes_N5: Tensor, seconds: float, batch: int, log: Log
) -> None:
    """Trains in place for ``seconds``; leaves the averaged weights and sets the latents' scale and shift."""
    device = recipes_N5.device
    clock, steps = Clock(seconds, PEAK), Steps(vae, DECAY)
    small, large = (Trial(vae, steps, *shape, device) for shape in ((64, batch), (128, max(1, batch // 4))))
    for step in clock.ticks():
        trial = large if step % LARGE_EVERY == LARGE_EVERY - 1 else small
        steps.set_rate(clock.rate)
        loss = trial.run(composer, recipes_N5)
        steps.average(step)
        if step % 200 == 0:
            log.add(step=step, seconds=clock.elapsed, loss=loss.item())
    steps.settle()
    normalise(vae, composer, recipes_N5[:4096])


def loss_of(vae: AutoencoderKL, pictures_BCHW: Tensor) -> Tensor:
    """Absolute error, error of the edges, and divergence from a unit Gaussian, weighed together."""
    with torch.autocast(pictures_BCHW.device.type, torch.bfloat16, enabled=pictures_BCHW.is_cuda):
        posterior = vae.encode(pictures_BCHW).latent_dist
        drawn = vae.decode(posterior.sample()).sample.float()
    error = (drawn - pictures_BCHW).abs().mean()
    edges = sum(F.l1_loss(drawn.diff(dim=d), pictures_BCHW.diff(dim=d)) for d in (2, 3))
    mean, logvar = posterior.mean.float(), posterior.logvar.float()
    kl: Tensor = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    whole: Tensor = error + EDGE_WEIGHT * edges + KL_WEIGHT * kl
    return whole


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
