"""Fetches the pictures and names and writes the picture set: ``python -m training.fetch``.

The set is a folder with ``index.json`` (names) and one lossless sheet a style, ``<style>.webp``: RGBA tiles
of 128×128 pixels, 32 a row, in the order of the index.
"""

import argparse
import io
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from PIL import Image

from training import names, packages
from training.names import Emoji

TILE = 128
COLUMNS = 32
STYLES = ("glossy", "flat", "classic")
EXPECTED = 1011
DEFAULT = Path(".train/set")


def main() -> None:
    """Fetch, check, render, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT)
    parser.add_argument("--packages", type=Path, default=Path(".train/packages"))
    options = parser.parse_args()
    archives = {p.name: packages.download(p, options.packages) for p in _sources()}
    for package in _sources():
        packages.check(package, archives[package.name])
    pictures = {
        "glossy": webp_pictures(archives[packages.GLOSSY.name]),
        "flat": svg_pictures(archives[packages.FLAT.name]),
        "classic": icon_pictures(archives[packages.CLASSIC.name]),
    }
    listed = names.load(archives[packages.NAMES.name])
    emoji = [e for e in listed if all(e.code in p for p in pictures.values())]
    if len(emoji) != EXPECTED:
        raise packages.SourceChanged(f"{len(emoji)} emoji in all styles, expected {EXPECTED}")
    write(options.out, emoji, pictures)


def _sources() -> list[packages.Package]:
    return [packages.GLOSSY, packages.FLAT, packages.CLASSIC, packages.NAMES]


Renderers = dict[str, Callable[[], Image.Image]]


def webp_pictures(archive: Path) -> Renderers:
    """Pictures of the 256×256 WebP package, scaled down when called."""

    def opener(data: bytes) -> Callable[[], Image.Image]:
        side = (TILE, TILE)
        return lambda: Image.open(io.BytesIO(data)).convert("RGBA").resize(side, Image.Resampling.LANCZOS)

    return {code: opener(data) for code, data in packages.assets(archive, packages.GLOSSY.prefix)}


def svg_pictures(archive: Path) -> Renderers:
    """Pictures of the SVG package, rendered when called."""
    found = packages.assets(archive, packages.FLAT.prefix)
    return {code: _renderer(data.decode()) for code, data in found}


def icon_pictures(archive: Path) -> Renderers:
    """Pictures of the icon set: one JSON of SVG bodies, another from code points to icon names."""
    icons = json.loads(packages.read(archive, "package/icons.json"))
    chars = json.loads(packages.read(archive, "package/chars.json"))
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}">'
    head = head.format(w=icons["width"], h=icons["height"])
    found = {packages.code_key(code): icons["icons"].get(icon) for code, icon in chars.items()}
    return {code: _renderer(f"{head}{icon['body']}</svg>") for code, icon in found.items() if icon}


def _renderer(svg: str) -> Callable[[], Image.Image]:
    def render() -> Image.Image:
        import resvg_py  # noqa: PLC0415  needed here only: a GPU machine can go without it

        png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=TILE, height=TILE))
        picture = Image.open(io.BytesIO(png)).convert("RGBA")
        square = Image.new("RGBA", (TILE, TILE))  # a few drawings are not square: centre them
        square.paste(picture, ((TILE - picture.width) // 2, (TILE - picture.height) // 2))
        return square

    return render


def write(folder: Path, emoji: list[Emoji], pictures: dict[str, Renderers]) -> None:
    """Writes the index and the sheets; refuses a picture that is nearly empty."""
    folder.mkdir(parents=True, exist_ok=True)
    for style in STYLES:
        rows = -(-len(emoji) // COLUMNS)
        sheet = Image.new("RGBA", (COLUMNS * TILE, rows * TILE))
        for i, one in enumerate(emoji):
            tile = pictures[style][one.code]()
            if tile.size != (TILE, TILE) or sum(tile.getchannel("A").histogram()[128:]) < TILE:
                raise packages.SourceChanged(f"{style} {one.name}: empty or odd picture {tile.size}")
            sheet.paste(tile, (i % COLUMNS * TILE, i // COLUMNS * TILE))
        sheet.save(folder / f"{style}.webp", lossless=True, quality=60, method=3)
    (folder / "index.json").write_text(json.dumps([asdict(e) for e in emoji], indent=1))
    print(f"{len(emoji)} emoji in {len(STYLES)} styles written to {folder}")


if __name__ == "__main__":
    main()
