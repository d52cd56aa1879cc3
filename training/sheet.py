"""Draws the contact sheet, 64 prompts in 8 rows: ``python -m training.sheet``."""

import argparse
from pathlib import Path

import torch
from PIL import Image

from training import score
from training.score import MODEL, Draw

ROWS = (
    (
        "rocket",
        "red apple",
        "dog face",
        "fire",
        "hamburger",
        "octopus",
        "guitar",
        "house with garden",
    ),
    ("pizza", "owl", "sailboat", "sunflower", "alarm clock", "fox", "birthday cake", "soccer ball"),
    ("panda", "locomotive", "watermelon", "crown", "snowman", "tropical fish", "umbrella", "tiger face"),
)
COMPOSED = (
    "a glossy cat on a blue background",
    "a classic strawberry on a yellow background",
    "a flat ghost on a purple background",
    "a glossy lemon on a green background",
    "a classic penguin on a pink background",
    "a flat bicycle on an orange background",
    "a glossy robot on a teal background",
    "a classic crab on a grey background",
    "a glossy purple apple",
    "a flat blue tomato",
    "a classic green heart with ribbon",
    "a glossy pink banana",
    "a glossy teal automobile",
    "a flat red pear",
    "a classic purple duck",
    "a glossy green tulip",
    "a classic dog and a cat",
    "a glossy pizza and a hamburger",
    "a flat sun and a cloud",
    "a glossy rocket and an alien",
    "a classic apple and a banana",
    "a flat bus and a bicycle",
    "a glossy fox and an owl",
    "a classic guitar and a violin",
)
FACES = (
    "a glossy smiling face with sunglasses",
    "a flat thinking face",
    "a classic clown face",
    "a glossy face with tears of joy",
    "a classic exploding head",
    "a flat sleeping face",
    "a glossy skull",
    "a classic alien",
    "a flower",
    "a tree",
    "a book",
    "a car",
    "coffee",
    "a boat",
    "a hat",
    "a computer",
)


def prompts() -> list[str]:
    """The 64 prompts in the order of the sheet."""
    plain = [
        f"a {style} {name}"
        for style, row in zip(("glossy", "classic", "flat"), ROWS, strict=True)
        for name in row
    ]
    return [*plain, *FACES, *COMPOSED]


def sheet(pictures_BCHW: torch.Tensor, tile: int) -> Image.Image:
    """Pictures in 0..1 as one image, 8 a row."""
    count, _, height, width = pictures_BCHW.shape
    grid = pictures_BCHW.view(count // 8, 8, 3, height, width).permute(0, 3, 1, 4, 2)
    pixels = (grid.reshape(count // 8 * height, 8 * width, 3) * 255).round().byte()
    image = Image.fromarray(pixels.numpy())
    return image.resize((8 * tile, count // 8 * tile), Image.Resampling.LANCZOS)


def main() -> None:
    """Draw and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--out", type=Path, default=MODEL / "contact-sheet.webp")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    pipeline = score.load(options.model, options.device)
    how = Draw(options.steps, options.size, batch=16)
    sheet(score.draw(pipeline, prompts(), how), 112).save(options.out, quality=88, method=6)


if __name__ == "__main__":
    main()
