"""The ledger's Lua, made ready for one deployment, and how a script is called.

Every script is the lane library, the settings as Lua constants, common.lua and its own file: one call does
record, message and event together. Scripts bear being sent twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

from saggar.jobs.errors import SaggarError
from saggar.jobs.lanes import LANE_LIB
from saggar.jobs.lanes.script import ALLOW_OOM
from saggar.jobs.settings import JobSettings

T_co = TypeVar("T_co", covariant=True)
Reply = str | int | None | list["Reply"]
Argument = str | int
_ADDS = frozenset({"submit", "replace", "open", "extend"})
LEDGER_SCRIPTS = Path(__file__).with_name("scripts")


@dataclass(frozen=True, slots=True)
class Op(Generic[T_co]):
    """One call of one script: what is sent, and how the reply is read. Knows no connection, so that the
    clients with and without asyncio differ in one `await`."""

    script: str
    args: Sequence[Argument]
    parse: Callable[[Reply], T_co]
    when_full: SaggarError | None = None
    """What a server without memory means for the caller; None: the server's own error."""


class Scripts:
    """The texts and hashes of all scripts under these settings."""

    def __init__(
        self, settings: JobSettings, *, knows_flags: bool = False, folder: Path = LEDGER_SCRIPTS
    ) -> None:
        """`knows_flags`: the server understands a script's flags (lanes.knows_flags says so). `folder`: of scripts
        that stand upon the ledger's own common.lua, with a common.lua beside them."""
        self._settings = settings
        self._knows_flags = knows_flags
        self._folder = folder

    @cached_property
    def texts(self) -> dict[str, str]:
        """A full server takes no new jobs, yet lets those it has come to their end, which makes room."""
        bare = self._bare
        if not self._knows_flags:
            return bare
        return {name: text if name in _ADDS else ALLOW_OOM + text for name, text in bare.items()}

    @cached_property
    def _bare(self) -> dict[str, str]:
        head = LANE_LIB + _constants(self._settings) + (LEDGER_SCRIPTS / "common.lua").read_text()
        if self._folder != LEDGER_SCRIPTS:
            head += (self._folder / "common.lua").read_text()
        files = sorted(path for path in self._folder.glob("*.lua") if path.stem != "common")
        return {path.stem: f"{head}\n{path.read_text()}" for path in files}

    @cached_property
    def hashes(self) -> dict[str, str]:
        """As EVALSHA wants them."""
        return {name: hashlib.sha1(text.encode()).hexdigest() for name, text in self.texts.items()}  # noqa: S324


def _constants(settings: JobSettings) -> str:
    """Prefixes have a form that needs no quoting (settings.py checks it); the rest are integers."""
    return f"""
local P, META = '{settings.key_prefix}', '{settings.result_key_prefix}'
local RECORD_TTL, EVENT_TTL = {settings.record_ttl_s * 1000}, {settings.event_ttl_s * 1000}
local RESULT_TTL, TOMB_TTL = {settings.result_ttl_s * 1000}, {settings.tombstone_ttl_s * 1000}
local JOB_EVENTS, RUN_EVENTS = {settings.job_events_max}, {settings.run_events_max}
"""
