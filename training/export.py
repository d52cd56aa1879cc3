"""Writes a trained run as a pipeline folder: ``python -m training.export``.

The folder is plain diffusers format in float16, with the reference pictures beside it; whoever loads it
without naming a precision gets float32.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FluxPipeline

from training import models, references, sprites, tokens
from training.fetch import STYLES
from training.flow import Flow
from training.train import load_flow

DEFAULT = Path("engine/assets/emoji")
SHARD = "8MB"


def main() -> None:
    """Export pipeline and references."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", type=Path, default=Path(".train/set"))
    parser.add_argument("--run", type=Path, default=Path(".train/run"))
    parser.add_argument("--out", type=Path, default=DEFAULT)
    parser.add_argument("--limit", type=int, help="the limit that the run was trained with")
    options = parser.parse_args()
    write_pipeline(options.run, options.out)
    write_references(sprites.load(options.set, options.limit), options.out / "references.zip")
    total = sum(file.stat().st_size for file in options.out.rglob("*") if file.is_file())
    print(f"{options.out}: {total / 1e6:.1f} MB")


def write_pipeline(run: Path, out: Path) -> None:
    """Gathers the parts of a run and saves them."""
    shape = models.Shape()
    clip, t5 = tokens.load(run)
    made = Flow(models.build_transformer(shape), models.build_t5(shape, t5), models.build_clip(shape, clip))
    load_flow(made, run)
    pipeline = FluxPipeline(
        scheduler=models.build_scheduler(),
        vae=AutoencoderKL.from_pretrained(run / "vae"),
        text_encoder=made.clip,
        tokenizer=clip,
        text_encoder_2=made.t5,
        tokenizer_2=t5,
        transformer=made.transformer,
    )
    pipeline.to(dtype=torch.float16)
    pipeline.save_pretrained(out, max_shard_size=SHARD)
    # The text encoders' library loads in the precision that the configuration names.
    _edit(out / "text_encoder" / "config.json", dtype="float32")
    _edit(out / "text_encoder_2" / "config.json", dtype="float32")
    _edit(out / "vae" / "config.json", _name_or_path=None)  # a path of the machine that exported


def _edit(path: Path, **changes: str | None) -> None:
    """Sets values of a JSON file, or removes those that are None."""
    config = {
        k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not None or k not in changes
    }
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_references(pictures: sprites.Sprites, path: Path) -> None:
    """Shrinks every sprite to 32×32 (premultiplied, so that edges stay clean) and writes the file."""
    rgba = pictures.pictures_SNCHW.flatten(0, 1).float() / 255
    pre = torch.cat([rgba[:, :3] * rgba[:, 3:], rgba[:, 3:]], 1)
    small = F.interpolate(pre, (references.SIDE,) * 2, mode="area")
    straight = torch.cat([small[:, :3] / small[:, 3:].clamp(min=1 / 255), small[:, 3:]], 1)
    pixels = (straight.clamp(0, 1) * 255).round().byte()
    references.write(path, [e.name for e in pictures.emoji], list(STYLES), pixels)


if __name__ == "__main__":
    main()
