"""Scores the pipeline's pictures against the reference pictures: ``python -m training.score``.

"Nearest" is always the smallest mean square difference at 32×32. Chance for the named picture is 1 in 3,033.

Letters in shapes: B batch, R references, C channel, H height, W width. Pictures are RGB in 0..1.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import FluxPipeline
from torch import Tensor

from training import references
from training.captions import BACKGROUNDS, with_article
from training.compose import inset
from training.references import References
from training.tokens import LENGTH

MODEL = Path("engine/assets/emoji")
CFG = 3.0
BORDER = 3  # pixels of a 64×64 picture


@dataclass(frozen=True)
class Ask:
    """A prompt and what its picture must show."""

    prompt: str
    style: str
    names: tuple[str, ...]
    background: str = "white"


@dataclass(frozen=True)
class Draw:
    """How pictures are made."""

    steps: int = 20
    size: int = 64
    batch: int = 25
    seed: int = 1000


def load(model: Path = MODEL, device: str = "cpu") -> FluxPipeline:
    """The pipeline as anyone loads it, without its progress bar."""
    pipeline = FluxPipeline.from_pretrained(str(model)).to(device)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def plain_asks(known: References, count: int, seed: int) -> list[Ask]:
    """Prompts for one emoji in one style, in the words of the training captions."""
    rng = random.Random(seed)
    forms = ("{a}", "{a} emoji", "{plain}", "{name}, {style} style")
    asks = []
    for _ in range(count):
        style, name = rng.choice(known.styles), rng.choice(known.names)
        words = f"{style} {name}"
        prompt = rng.choice(forms).format(a=with_article(words), plain=words, name=name, style=style)
        asks.append(Ask(prompt, style, (name,)))
    return asks


def background_asks(known: References, count: int, seed: int) -> list[Ask]:
    """Prompts for one emoji on a coloured background; every colour is asked for equally often."""
    rng = random.Random(seed)
    colours = [list(BACKGROUNDS)[i % len(BACKGROUNDS)] for i in range(count)]
    asks = []
    for colour in colours:
        style, name = rng.choice(known.styles), rng.choice(known.names)
        prompt = f"{with_article(f'{style} {name}')} on a {colour} background"
        asks.append(Ask(prompt, style, (name,), colour))
    return asks


def pair_asks(known: References, count: int, seed: int) -> list[Ask]:
    """Prompts for two emoji side by side."""
    rng = random.Random(seed)
    asks = []
    for _ in range(count):
        style, (left, right) = rng.choice(known.styles), rng.sample(known.names, 2)
        asks.append(Ask(f"{with_article(f'{style} {left}')} and {with_article(right)}", style, (left, right)))
    return asks


def draw(pipeline: FluxPipeline, prompts: Sequence[str], how: Draw) -> Tensor:
    """Pictures ``[B, 3, size, size]`` of the prompts, each with its own seed."""
    parts = []
    for start in range(0, len(prompts), how.batch):
        chunk = list(prompts[start : start + how.batch])
        seeds = range(how.seed + start, how.seed + start + len(chunk))
        made = pipeline(
            prompt=chunk,
            negative_prompt=[""] * len(chunk),
            true_cfg_scale=CFG,
            num_inference_steps=how.steps,
            height=how.size,
            width=how.size,
            max_sequence_length=LENGTH,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            output_type="np",
        )
        parts.append(torch.from_numpy(np.asarray(made.images)).permute(0, 3, 1, 2))
    return torch.cat(parts)


def nearest(pictures_BCHW: Tensor, known_RCHW: Tensor) -> Tensor:
    """Row of the nearest reference for each picture, compared at 32×32: ``[B]``."""
    small = F.interpolate(pictures_BCHW, known_RCHW.shape[-2:], mode="area")
    return torch.cdist(small.flatten(1), known_RCHW.flatten(1)).argmin(1)


def border_colours(pictures_BCHW: Tensor) -> list[str]:
    """The name of the flat colour nearest to each picture's mean border pixel."""
    mask = torch.ones(pictures_BCHW.shape[-2:], dtype=torch.bool)
    width = BORDER * pictures_BCHW.shape[-1] // 64
    mask[width:-width, width:-width] = False
    means = pictures_BCHW[:, :, mask].mean(-1)
    palette = torch.tensor(list(BACKGROUNDS.values())) / 255
    return [list(BACKGROUNDS)[i] for i in torch.cdist(means, palette).argmin(1).tolist()]


def share(hits: Sequence[bool]) -> float:
    """Share of true values."""
    return sum(hits) / len(hits)


def score_plain(pipeline: FluxPipeline, known: References, count: int, how: Draw) -> dict[str, float]:
    """Shares of pictures whose nearest reference is the asked one, has its style, has its name."""
    asks = plain_asks(known, count, seed=1)
    found = nearest(draw(pipeline, [a.prompt for a in asks], how), known.on()).tolist()
    wanted = [known.index(a.style, a.names[0]) for a in asks]
    size = len(known.names)
    return {
        "top1": share([f == w for f, w in zip(found, wanted, strict=True)]),
        "style": share([f // size == w // size for f, w in zip(found, wanted, strict=True)]),
        "name": share([f % size == w % size for f, w in zip(found, wanted, strict=True)]),
    }


def score_background(pipeline: FluxPipeline, known: References, count: int, how: Draw) -> dict[str, float]:
    """Shares of pictures with the asked border colour, and with the asked emoji on it."""
    asks = background_asks(known, count, seed=2)
    pictures = draw(pipeline, [a.prompt for a in asks], how)
    colours = border_colours(pictures)
    side = inset(how.size)
    edge = (how.size - side) // 2
    centres = pictures[:, :, edge : edge + side, edge : edge + side]
    right = []
    for ask, centre in zip(asks, centres, strict=True):
        row = nearest(centre[None], known.on(BACKGROUNDS[ask.background])).item()
        right.append(row == known.index(ask.style, ask.names[0]))
    return {
        "border": share([c == a.background for c, a in zip(colours, asks, strict=True)]),
        "top1": share(right),
    }


def score_pairs(pipeline: FluxPipeline, known: References, count: int, how: Draw) -> dict[str, float]:
    """Share of the halves, and of whole pictures, that show what was asked for."""
    asks = pair_asks(known, count, seed=3)
    pictures = draw(pipeline, [a.prompt for a in asks], how)
    half = how.size // 2
    rows = slice(half // 2, half // 2 + half)
    sides = [nearest(pictures[:, :, rows, x : x + half], known.on()).tolist() for x in (0, half)]
    hits = [[sides[k][i] == known.index(a.style, a.names[k]) for k in range(2)] for i, a in enumerate(asks)]
    halves = [hit for pair in hits for hit in pair]
    return {"half": share(halves), "both": share([all(pair) for pair in hits])}


def main() -> None:
    """All scores as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, default=200, help="plain prompts; fewer of other kinds")
    parser.add_argument("--out", type=Path, help="also write the scores here, beside those already there")
    parser.add_argument(
        "--only", nargs="*", help="endings of the scores to take, e.g. _8_steps; default: all"
    )
    options = parser.parse_args()
    began = time.monotonic()
    pipeline, known = load(options.model, options.device), references.read(options.model / "references.zip")
    scores: dict[str, float] = {}
    if options.out and options.out.exists():
        scores = json.loads(options.out.read_text())
    for kind, score in kinds(options.count).items():
        if options.only is not None and kind not in options.only:
            continue
        found = score(pipeline, known)
        scores |= {f"{key}{kind}": round(value, 4) for key, value in found.items()}
        print(f"{time.monotonic() - began:.0f} s", json.dumps(scores), flush=True)
        if options.out:
            options.out.write_text(json.dumps(scores, indent=1) + "\n")


def kinds(count: int) -> dict[str, Callable[[FluxPipeline, References], dict[str, float]]]:
    """The scores to take, by the ending of their names; ``count`` plain prompts, fewer of the other kinds."""
    half, quarter = max(1, count // 2), max(1, count // 4)
    return {
        "_20_steps": partial(score_plain, count=count, how=Draw(20)),
        "_8_steps": partial(score_plain, count=count, how=Draw(8)),
        "_background": partial(score_background, count=half, how=Draw()),
        "_pair": partial(score_pairs, count=half, how=Draw()),
        "_4_steps": partial(score_plain, count=half, how=Draw(4)),
        "_128_px": partial(score_plain, count=quarter, how=Draw(size=128, batch=10)),
    }


if __name__ == "__main__":
    main()
