"""Encoded prompts that are kept in the rank: the texts of a run repeat themselves, the negative prompt above all.

An entry stands for one text under one `variant` (length, adapters: whatever else its encoding depends on) of the one
encoder that the rank has loaded. It stays on the encoder's device, so the limit counts device memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from saggar.engine.request import TextCut

if TYPE_CHECKING:
    import torch

Encoded: TypeAlias = "Mapping[str, torch.Tensor]"
"""What an encoder makes of one text: tensors by name, each of shape [1, ...]."""


class Known(NamedTuple):
    """An encoded text, and what its encoders did not read of it."""

    encoded: Encoded
    cut: TextCut | None = None


class PromptCache:
    """The least recently used entries go once there are more than `limit` bytes; 0 keeps none.

    Not thread-safe: a rank encodes in one thread.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[tuple[str, str], Known] = OrderedDict()
        self.bytes = 0

    def get(self, text: str, variant: str) -> Known | None:
        """A copy, for a request may change what it has been given."""
        entry = self._entries.get((text, variant))
        if entry is None:
            return None
        self._entries.move_to_end((text, variant))
        return Known(_copy(entry.encoded), entry.cut)

    def put(self, text: str, variant: str, encoded: Encoded, cut: TextCut | None = None) -> None:
        """Keeps a copy: the tensors may be views of a whole batch. An entry larger than the limit is not kept."""
        size = _bytes(encoded)
        if size > self._limit or (text, variant) in self._entries:
            return
        self._entries[(text, variant)] = Known(_copy(encoded), cut)
        self.bytes += size
        while self.bytes > self._limit:
            self.bytes -= _bytes(self._entries.popitem(last=False)[1].encoded)

    def __len__(self) -> int:
        return len(self._entries)


def _copy(encoded: Encoded) -> Encoded:
    return {name: tensor.clone() for name, tensor in encoded.items()}


def _bytes(encoded: Encoded) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in encoded.values())
