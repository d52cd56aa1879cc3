"""Recipes, captions and the pictures drawn from them, on a picture set made here."""

from __future__ import annotations

import json
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
import torch

from training import names, packages, sprites
from training.captions import BACKGROUNDS, HUES, Author, Recipe, colourless, with_article
from training.compose import Composer, inset
from training.names import Emoji
from training.sprites import Sprites

CPU = torch.device("cpu")
THINGS = [
    Emoji("1", "red disc", ("disc",), "objects"),
    Emoji("2", "stone", (), "objects"),
    Emoji("3", "orange", (), "food, drink"),
]


def disc(colour: tuple[int, int, int]) -> torch.Tensor:
    """A uint8 RGBA sprite: a disc of one colour on nothing."""
    y, x = torch.meshgrid(torch.arange(128), torch.arange(128), indexing="ij")
    inside = ((y - 64) ** 2 + (x - 64) ** 2 < 50**2).to(torch.uint8)
    return torch.stack([*(inside * value for value in colour), inside * 255]).to(torch.uint8)


@pytest.fixture
def three() -> Sprites:
    style = torch.stack([disc((220, 20, 20)), disc((120, 120, 120)), disc((255, 140, 0))])
    pictures = torch.stack([style] * 3)
    return Sprites(THINGS, pictures, torch.stack([sprites.main_hues(s) for s in pictures]))


def drawn(three: Sprites, recipe: Recipe) -> torch.Tensor:
    """The one picture of a recipe, 64×64, as RGB 0..255."""
    picture = Composer(three, (64,), CPU).draw(torch.tensor([recipe.numbers]), 64)[0]
    return ((picture + 1) * 127.5).round()


def test_grey_has_no_hue_and_red_has(three: Sprites) -> None:
    red, grey, orange = three.hues_SN[0].tolist()
    assert min(red, 1 - red) < 0.02
    assert grey != grey  # nan
    assert abs(orange - 33 / 360) < 0.02


def test_hsv_and_back() -> None:
    rgb = torch.rand(4, 3, 8, 8)
    assert torch.allclose(sprites.to_rgb(sprites.to_hsv(rgb)), rgb, atol=1e-5)


def test_plain_picture_is_on_white(three: Sprites) -> None:
    picture = drawn(three, Recipe(0, 0))
    assert picture[:, 0, 0].tolist() == [255, 255, 255]
    assert picture[:, 32, 32].tolist() == [220, 20, 20]


def test_background_fills_the_border(three: Sprites) -> None:
    blue = list(BACKGROUNDS).index("blue")
    picture = drawn(three, Recipe(0, 0, background=blue))
    edge = (64 - inset(64)) // 2
    assert picture[:, edge - 1, edge - 1].tolist() == list(BACKGROUNDS["blue"])
    assert picture[:, 32, 32].tolist() == [220, 20, 20]


def test_recoloured_picture_has_the_other_hue(three: Sprites) -> None:
    red, green, blue = drawn(three, Recipe(0, 0, hue=list(HUES).index("green")))[:, 32, 32].tolist()
    assert green > 200
    assert max(red, blue) < 40


def test_pair_stands_side_by_side(three: Sprites) -> None:
    picture = drawn(three, Recipe(0, 0, second=2))
    assert picture[:, 32, 16].tolist() == [220, 20, 20]
    assert picture[:, 32, 48].tolist() == [255, 140, 0]


def test_captions_name_what_recipes_show(three: Sprites) -> None:
    author = Author(THINGS, (~three.hues_SN.isnan()).tolist(), seed=3)
    for recipe in (author.draw() for _ in range(500)):
        text = recipe.caption.lower()
        assert any(name in text for name in (THINGS[recipe.first].name, *THINGS[recipe.first].aliases))
        assert recipe.hue < 0 or list(HUES)[recipe.hue] in text
        assert recipe.background < 0 or list(BACKGROUNDS)[recipe.background] in text
        assert recipe.hue < 0 or recipe.first == 0  # stone is grey, "orange" is a colour word


def test_the_same_seed_writes_the_same_captions(three: Sprites) -> None:
    mask = (~three.hues_SN.isnan()).tolist()
    first, second = Author(THINGS, mask, seed=5), Author(THINGS, mask, seed=5)
    assert [first.draw() for _ in range(50)] == [second.draw() for _ in range(50)]


def test_words() -> None:
    assert with_article("owl") == "an owl"
    assert with_article("flat owl") == "a flat owl"
    assert colourless(THINGS[0]) == ["disc"]
    assert names.clean(":dog_face:") == "dog face"
    assert packages.code_key("2764-FE0F") == "2764"


def test_a_package_with_another_licence_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "thing.tgz"
    manifest = json.dumps({"version": "1.0.0", "license": "UNLICENSED"}).encode()
    with tarfile.open(path, "w:gz") as tar:
        info = tarfile.TarInfo("package/package.json")
        info.size = len(manifest)
        tar.addfile(info, BytesIO(manifest))
    with pytest.raises(packages.SourceChanged):
        packages.check(packages.Package("thing", "1.0.0", "MIT", "package/assets/", 0), path)
