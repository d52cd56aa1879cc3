"""What Doodle's weights are called in the files that its authors published, and what in model.py.

The transformer comes in two files, from a training that kept its counters among the weights; the text encoder comes
from another project, with names of that one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Rule = tuple[str, str | None]
"""A pattern of the whole name, and what takes its place; None: a tensor that is not needed."""

BLOCKS: Sequence[Rule] = (
    (r"model\.layers\.(\d+)\.attn\.q_proj\.(.*)", r"blocks.\1.attention.query.\2"),
    (r"model\.layers\.(\d+)\.attn\.k_proj\.(.*)", r"blocks.\1.attention.key.\2"),
    (r"model\.layers\.(\d+)\.attn\.v_proj\.(.*)", r"blocks.\1.attention.value.\2"),
    (r"model\.layers\.(\d+)\.attn\.o_proj\.(.*)", r"blocks.\1.attention.out.\2"),
    (r"model\.layers\.(\d+)\.mlp\.(.*)", r"blocks.\1.feed.\2"),
    (r"model\.layers\.(\d+)\.ada\.(.*)", r"blocks.\1.modulation.\2"),
    (r"training\..*", None),
)
ENDS: Sequence[Rule] = (
    (r"x_embedder\.(.*)", r"first.\1"),
    (r"t_embedder\.(.*)", r"time.\1"),
    (r"final\.(.*)", r"last.\1"),
)
TEXT: Sequence[Rule] = (
    (r"wte\.weight", "token.weight"),
    (r"wpe\.weight", "place.weight"),
    (r"ln_f\.(.*)", r"norm.\1"),
    (r"proj\.(.*)", r"out.\1"),
)


def renaming(rules: Sequence[Rule]) -> Callable[[str], str | None]:
    """The function that applies the first rule that fits; a name without a rule stays, and loading will refuse it."""

    def rename(name: str) -> str | None:
        for pattern, ours in rules:
            if match := re.fullmatch(pattern, name):
                return None if ours is None else match.expand(ours)
        return name

    return rename
