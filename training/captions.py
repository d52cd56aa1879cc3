"""What a training picture shows and how it is asked for: recipes with captions, drawn at random.

A recipe is one emoji, or two side by side, in one style; perhaps in another colour, perhaps on a background.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from training.fetch import STYLES
from training.names import Emoji

# Flat background colours, RGB 0..255. The scorer names a border by the nearest of these.
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "red": (229, 57, 53),
    "orange": (251, 140, 0),
    "yellow": (253, 216, 53),
    "green": (67, 160, 71),
    "teal": (0, 172, 172),
    "blue": (33, 110, 240),
    "purple": (142, 36, 170),
    "pink": (248, 150, 185),
    "grey": (150, 150, 150),
    "black": (20, 20, 20),
}

# Hues, in degrees, that a recoloured object can take.
HUES: dict[str, float] = {
    "red": 0,
    "orange": 28,
    "yellow": 50,
    "green": 120,
    "teal": 178,
    "blue": 215,
    "purple": 275,
    "pink": 328,
}

# Cumulative odds of a plain picture, one on a background, a recoloured one; the rest are pairs.
PLAIN, ON_BACKGROUND, RECOLOURED = 0.50, 0.70, 0.83
STYLE_DROPPED = 0.15
BEHIND = (" on a {} background", " on a {} background", ", {} background", " on {}")
ALIAS = 0.25
COMPOSED_TOO = 0.2  # a pair or a recoloured object that also has a background


@dataclass(frozen=True, slots=True)
class Recipe:
    """Indices into styles, emoji, ``HUES``, ``BACKGROUNDS``; -1: no second, own hue, no background."""

    style: int
    first: int
    second: int = -1
    hue: int = -1
    background: int = -1
    caption: str = ""

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        """The row that a composer reads."""
        return self.style, self.first, self.second, self.hue, self.background


class Author:
    """Draws recipes and writes their captions; ``colourable[style][emoji]`` says what can be recoloured."""

    def __init__(self, emoji: Sequence[Emoji], colourable: Sequence[Sequence[bool]], seed: int) -> None:
        self.emoji = emoji
        self.rng = random.Random(seed)
        self.taken = {e.name for e in emoji}
        self.dyeable = [[i for i, e in enumerate(emoji) if row[i] and colourless(e)] for row in colourable]

    def draw(self) -> Recipe:
        """One recipe of a random kind."""
        kind = self.rng.random()
        style, first = self.rng.randrange(len(STYLES)), self.rng.randrange(len(self.emoji))
        if kind < PLAIN:
            return self._finish(style, first, self._word(first))
        if kind < ON_BACKGROUND:
            return self._finish(style, first, self._word(first), background=self._background())
        behind = self._background() if self.rng.random() < COMPOSED_TOO else -1
        if kind < RECOLOURED and self.dyeable[style]:
            return self._recoloured(style, behind)
        second = self.rng.randrange(len(self.emoji))
        joint = self.rng.choice((" and {}", " and {}", " next to {}", " beside {}"))
        words = self._word(first) + joint.format(self._article(self._word(second)))
        return self._finish(style, first, words, second=second, background=behind)

    def _recoloured(self, style: int, background: int) -> Recipe:
        first, hue = self.rng.choice(self.dyeable[style]), self.rng.randrange(len(HUES))
        word = f"{list(HUES)[hue]} {self._colourless(first)}"
        if word in self.taken:  # "green apple" is a drawing of its own
            return self._finish(style, first, self._word(first), background=background)
        return self._finish(style, first, word, hue=hue, background=background)

    def _colourless(self, index: int) -> str:
        names = colourless(self.emoji[index])
        return names[0] if self.rng.random() > ALIAS else self.rng.choice(names)

    def _word(self, index: int) -> str:
        emoji = self.emoji[index]
        return self.rng.choice(emoji.aliases) if emoji.aliases and self.rng.random() < ALIAS else emoji.name

    def _background(self) -> int:
        return self.rng.randrange(len(BACKGROUNDS))

    def _article(self, words: str) -> str:
        return with_article(words) if self.rng.random() < 0.5 else words

    def _finish(
        self, style: int, first: int, words: str, second: int = -1, hue: int = -1, background: int = -1
    ) -> Recipe:
        behind = "" if background < 0 else self._behind(list(BACKGROUNDS)[background])
        named = None if self.rng.random() < STYLE_DROPPED else STYLES[style]
        caption = self._sentence(words, behind, named)
        if self.rng.random() < 0.15:
            caption = caption[0].upper() + caption[1:]
        return Recipe(style, first, second, hue, background, caption)

    def _behind(self, colour: str) -> str:
        return self.rng.choice(BEHIND).format(colour)

    def _sentence(self, words: str, behind: str, style: str | None) -> str:
        if style is None:
            return self.rng.choice((words, with_article(words), f"{words} emoji")) + behind
        form = self.rng.randrange(6)
        if form < 2:
            return self._article(f"{style} {words}") + behind
        if form == 2:
            return self._article(f"{style} {words} emoji") + behind
        if form == 3:
            return f"{self._article(words)}{behind}, {style}"
        if form == 4:
            return f"{self._article(words)}{behind}, {style} style"
        return f"{style} emoji of {with_article(words)}{behind}"


def with_article(words: str) -> str:
    """The words after "a" or "an"."""
    return f"{'an' if words[0] in 'aeiouAEIOU' else 'a'} {words}"


def colourless(emoji: Emoji) -> list[str]:
    """The names of an emoji that hold no colour word, e.g. "apple" for the red apple."""
    return [name for name in (emoji.name, *emoji.aliases) if not set(name.split()) & set(BACKGROUNDS)]
