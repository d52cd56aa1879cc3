"""Trains the whole model: ``python -m training.train``. Writes weights and logs to the run folder.

Tokenizers first (seconds), then the VAE, then the flow on latents cached from it. A run folder that already
has tokenizers or a VAE goes on from them; one with flow weights starts from them when ``--resume`` is given.
"""

import argparse
import time
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file
from torch import nn

from training import bank, flow, models, sprites, tokens, vae
from training.compose import Composer
from training.flow import Flow
from training.schedule import Log

CAPTIONS_FOR_TOKENIZERS = 60_000


def main() -> None:
    """Parse, prepare, train, save."""
    options = parse()
    torch.manual_seed(options.seed)
    settle_backends()
    device = torch.device(options.device)
    options.run.mkdir(parents=True, exist_ok=True)
    pictures = sprites.load(options.set, options.limit)
    if not (options.run / "tokenizer").exists():
        tokens.save(options.run, bank.write_captions(pictures, CAPTIONS_FOR_TOKENIZERS, seed=1))
    composer = Composer(pictures, (64, 128), device)
    began = time.monotonic()
    texts = bank.write_texts(pictures, options.run, options.small + options.large, options.seed, device)
    print(f"{len(texts)} captions in {time.monotonic() - began:.1f} s", flush=True)
    autoencoder = make_vae(options, composer, texts)
    if options.seconds == 0:
        return
    began = time.monotonic()
    small, large = bank.split(texts, (options.small, options.large))
    banks = bank.build(autoencoder, composer, small, 64), bank.build(autoencoder, composer, large, 128)
    print(f"latents cached in {time.monotonic() - began:.1f} s", flush=True)
    train_flow(options, banks)


def settle_backends() -> None:
    """Fast matrix products; attention by the flash kernels alone, the others crashed with these shapes."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cudnn.benchmark = True  # picture sizes come in two shapes only


def parse() -> argparse.Namespace:
    """Command line; the defaults are those of the released model on one large GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", type=Path, default=Path(".train/set"), help="picture set that fetch wrote")
    parser.add_argument("--run", type=Path, default=Path(".train/run"), help="folder of this run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int, help="use only this many emoji")
    parser.add_argument("--vae-seconds", type=float, default=150)
    parser.add_argument("--vae-batch", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=360)
    parser.add_argument(
        "--batch", type=int, default=512, help="pictures of 64 px a step; a quarter of 128 px"
    )
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--small", type=int, default=500_000, help="examples of 64 px in the bank")
    parser.add_argument("--large", type=int, default=150_000, help="examples of 128 px in the bank")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def make_vae(options: argparse.Namespace, composer: Composer, texts: bank.Texts) -> AutoencoderKL:
    """The run folder's VAE or a fresh one, trained (on) for the seconds asked for and saved there."""
    folder = options.run / "vae"
    model: AutoencoderKL = (
        AutoencoderKL.from_pretrained(folder) if folder.exists() else models.build_vae(models.Shape())
    )
    model.to(options.device, memory_format=torch.channels_last)
    if options.vae_seconds == 0:
        return model.eval()
    log = Log("vae")
    vae.train(model, composer, texts.recipes_N5, options.vae_seconds, options.vae_batch, log)
    sample = texts.recipes_N5[:256]
    errors = {f"error_{size}": vae.rebuild_error(model, composer, sample, size) for size in (64, 128)}
    log.add(step=log.rows[-1]["step"], **errors)
    log.save(options.run)
    model.save_pretrained(folder)
    return model.eval()


def make_flow(options: argparse.Namespace) -> Flow:
    """Fresh transformer and encoders, or the run folder's."""
    shape = models.Shape()
    clip, t5 = tokens.load(options.run)
    parts = models.build_transformer(shape), models.build_t5(shape, t5), models.build_clip(shape, clip)
    made = Flow(*parts)
    if options.resume:
        load_flow(made, options.run)
    return made.to(options.device).train()


def train_flow(options: argparse.Namespace, banks: tuple[bank.Bank, bank.Bank]) -> None:
    """Trains the flow, three batches of 64 px to one of 128 px, and saves the averaged weights."""
    made = make_flow(options)
    if options.compile:
        for module in (made.transformer, made.t5, made.clip):
            module.compile(dynamic=False)
    log = Log("flow")
    sizes = (banks[0], options.batch), (banks[1], max(1, options.batch // 4))
    flow.train(made, sizes, options.seconds, options.rate, log, lambda: save_flow(made, options.run))
    log.save(options.run)
    print(f"{models.count(made)} parameters saved to {options.run}", flush=True)


PARTS = ("transformer", "t5", "clip")


def save_flow(made: Flow, folder: Path) -> None:
    """Writes the three modules as float16 files."""
    for name in PARTS:
        module: nn.Module = getattr(made, name)
        state = {key: value.half().contiguous().cpu() for key, value in _own(module).items()}
        save_file(state, folder / f"flow-{name}.safetensors")


def load_flow(made: Flow, folder: Path) -> None:
    """Reads what ``save_flow`` wrote."""
    for name in PARTS:
        module: nn.Module = getattr(made, name)
        state = load_file(folder / f"flow-{name}.safetensors")
        assert state.keys() == _own(module).keys(), f"{name}: weights of another shape"
        module.load_state_dict(state, strict=False)  # buffers and tied names are not in the file


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters once each: tied weights under their first name, buffers left out."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


if __name__ == "__main__":
    main()
