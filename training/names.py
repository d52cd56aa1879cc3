"""Which emoji are used, and under which names: one English label each, aliases that mean one picture only."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from training.packages import code_key, read

# Groups of the Unicode list that are kept. People, flags and symbols are left out: a small model spends its
# capacity better on things that differ from one another.
GROUPS = {0: "smileys", 3: "animals, plants", 4: "food, drink", 5: "travel", 6: "activities", 7: "objects"}
BOOKS = ("emojibase", "github", "joypixels")  # lists of short codes, e.g. "dog_face"

# Drawn (almost) like another kept emoji in one of the styles, so no one could tell which was asked for.
TWINS = {"grinning cat", "snowman without snow"}

# Everyday words that the Unicode list gives to several pictures or to none.
EVERYDAY = {
    "apple": "red apple",
    "car": "automobile",
    "phone": "mobile phone",
    "computer": "laptop",
    "book": "closed book",
    "tree": "deciduous tree",
    "flower": "cherry blossom",
    "cake": "birthday cake",
    "boat": "sailboat",
    "beer": "beer mug",
    "coffee": "hot beverage",
    "heart": "sparkling heart",
    "clock": "alarm clock",
    "smiley": "grinning face with big eyes",
    "happy face": "smiling face with smiling eyes",
    "sad face": "crying face",
    "burger": "hamburger",
    "fries": "french fries",
    "moon": "crescent moon",
    "hat": "top hat",
    "bike": "bicycle",
    "plane": "airplane",
    "ball": "soccer ball",
    "chick": "front-facing baby chick",
    "sun": "sun with face",
}


@dataclass(frozen=True)
class Emoji:
    """One thing that can be asked for: its code key, its label and the other names it answers to."""

    code: str
    name: str
    aliases: tuple[str, ...]
    group: str


def load(archive: Path) -> list[Emoji]:
    """All emoji of the kept groups, in Unicode order, with aliases no other kept emoji claims."""
    listed = json.loads(read(archive, "package/en/data.json"))
    entries = [e for e in listed if e.get("group") in GROUPS and e["label"] not in TWINS]
    books = [json.loads(read(archive, f"package/en/shortcodes/{book}.json")) for book in BOOKS]
    claims = [_claims(entry, books) for entry in entries]
    labels = {clean(entry["label"]) for entry in entries}
    uses = Counter(claim for claimed in claims for claim in claimed)
    found = []
    for entry, claimed in zip(entries, claims, strict=True):
        name = clean(entry["label"])
        own = {c for c in claimed if uses[c] == 1 and c not in labels and c not in EVERYDAY and _usable(c)}
        own |= {word for word, label in EVERYDAY.items() if label == name and word != name}
        found.append(Emoji(code_key(entry["hexcode"]), name, tuple(sorted(own)), GROUPS[entry["group"]]))
    return found


def clean(name: str) -> str:
    """A name as captions write it: lower case, plain apostrophes, no underscores or colons."""
    return name.lower().replace("’", "'").replace("_", " ").replace(":", "").strip()


def _claims(entry: dict[str, object], books: list[dict[str, str | list[str]]]) -> set[str]:
    """Every short code and keyword of one entry of the list."""
    names = {clean(str(tag)) for tag in _listed(entry.get("tags", []))}
    for book in books:
        codes = book.get(str(entry["hexcode"]), [])
        names |= {clean(code) for code in ([codes] if isinstance(codes, str) else codes)}
    return names


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else []


def _usable(alias: str) -> bool:
    """Leaves out codes such as ``clock330`` and fragments such as ``t``."""
    return len(alias) >= 3 and alias.isascii() and not any(c.isdigit() for c in alias)
