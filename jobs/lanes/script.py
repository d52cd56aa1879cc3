"""The Lua scripts of a lane, as text: a library and what is done with it.

Comments and indentation are taken out, for a publish batch of kombu's sends the text of `put` with each
message.
"""

from functools import cache
from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).parent / "scripts"


def _text(name: str) -> str:
    lines = (line.strip() for line in (_FOLDER / f"{name}.lua").read_text(encoding="utf-8").splitlines())
    return "".join(f"{line}\n" for line in lines if line and not line.startswith("--"))


# Put in front of a script of the ledger's, so that ledger and message change in one step.
LANE_LIB: Final = _text("lib")


@cache
def script(name: str) -> str:
    """The whole text of a script: the library it needs, then its own."""
    light = name in {"put", "position", "expedite", "configure"}
    return LANE_LIB + ("" if light else _text("lease")) + _text(name)
