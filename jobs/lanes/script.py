"""The Lua scripts of a lane, as text: a library and what is done with it.

Comments and indentation are taken out, for a publish batch of kombu's sends the text of `put` with each
message.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).parent / "scripts"


def _text(name: str) -> str:
    lines = (line.strip() for line in (_FOLDER / f"{name}.lua").read_text(encoding="utf-8").splitlines())
    return "".join(f"{line}\n" for line in lines if line and not line.startswith("--"))


# Put in front of a script of the ledger's, so that ledger and message change in one step.
LANE_LIB: Final = _text("lib")


ALLOW_OOM: Final = "#!lua flags=allow-oom\n"
"""In front of a script that must work on a server at its memory limit."""


def knows_flags(info: Mapping[str, object]) -> bool:
    """Whether a server understands flags of scripts: Redis 7 and what came of it. `info`: of INFO server, {} where
    there is none.
    """
    return int(str(info.get("redis_version", "0")).partition(".")[0]) >= 7


@cache
def script(name: str) -> str:
    """The whole text of a script: the library it needs, then its own."""
    light = name in {"put", "position", "expedite", "configure"}
    return LANE_LIB + ("" if light else _text("lease")) + _text(name)
