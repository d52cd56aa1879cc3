"""Pictures that resemble an earlier one: difference hashes in a table of bounded size.

The hash is dHash (N. Krawetz, "Kind of Like That", 2013) with 16 × 16 bits: the picture is shrunk to 17 × 16 grey
values, and a bit says whether a value is brighter than its right neighbour. Here it must be so by more than two
levels, so that the noise of lossy files in flat areas sets no bits. It knows shapes, not colours.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 16
BITS = SIDE * SIDE
_NOISE = 2
_FIRST_ROOM = 1024


def fingerprint(pixels: NDArray[np.uint8]) -> bytes:
    """32 bytes of a picture (uint8, H×W×3)."""
    grey = Image.fromarray(np.ascontiguousarray(pixels)).convert("L")
    small = np.asarray(grey.resize((SIDE + 1, SIDE), Image.Resampling.BOX), np.int16)
    return np.packbits(small[:, :-1] - small[:, 1:] > _NOISE).tobytes()


class NearDuplicates:
    """The hashes of the latest `memory` pictures (32 bytes each, and their keys); a lookup compares with all of them.

    A million hashes are 32 MB and a few milliseconds.
    """

    def __init__(self, distance: int, memory: int) -> None:
        """`distance`: the largest number of different bits of 256 at which two pictures count as alike."""
        self.distance = distance
        self._memory = memory
        self._hashes = np.zeros((min(memory, _FIRST_ROOM), BITS // 64), np.uint64)
        self._keys: list[str] = []
        self._places: dict[str, int] = {}
        self._next = 0

    def nearest(self, key: str, mark: bytes) -> tuple[int, str | None]:
        """The least distance to a remembered picture of another key, and the first such key; 256, None without one."""
        known = self._hashes[: len(self._keys)]
        distances = np.bitwise_count(known ^ _words(mark)).sum(axis=1, dtype=np.int64)
        if (own := self._places.get(key)) is not None:
            distances[own] = BITS + 1
        if not distances.size or distances.min() > BITS:
            return BITS, None
        place = int(distances.argmin())
        return int(distances[place]), self._keys[place]

    def remember(self, key: str, mark: bytes) -> None:
        """A key that it knows gets the new hash; when it is full the oldest picture is forgotten."""
        if key in self._places:
            self._hashes[self._places[key]] = _words(mark)
            return
        place = self._next
        if place == len(self._keys):
            self._grow(place)
            self._keys.append(key)
        else:
            del self._places[self._keys[place]]
            self._keys[place] = key
        self._hashes[place] = _words(mark)
        self._places[key] = place
        self._next = (place + 1) % self._memory

    def _grow(self, place: int) -> None:
        if place == len(self._hashes):
            room = min(self._memory, 2 * place)
            self._hashes = np.concatenate([self._hashes, np.zeros((room - place, BITS // 64), np.uint64)])


def _words(mark: bytes) -> NDArray[np.uint64]:
    return np.frombuffer(mark, np.uint64)
