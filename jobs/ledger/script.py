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

from saggar.jobs.lanes import LANE_LIB
from saggar.jobs.settings import JobSettings

T_co = TypeVar("T_co", covariant=True)
Reply = str | int | None | list["Reply"]
Argument = str | int
_FOLDER = Path(__file__).with_name("scripts")


@dataclass(frozen=True, slots=True)
class Op(Generic[T_co]):
    """One call of one script: what is sent, and how the reply is read. Knows no connection, so that the
    clients with and without asyncio differ in one `await`."""

    script: str
    args: Sequence[Argument]
    parse: Callable[[Reply], T_co]


class Scripts:
    """The texts and hashes of all scripts under these settings."""

    def __init__(self, settings: JobSettings) -> None:
        self._settings = settings

    @cached_property
    def texts(self) -> dict[str, str]:
        head = LANE_LIB + _constants(self._settings) + (_FOLDER / "common.lua").read_text()
        files = sorted(path for path in _FOLDER.glob("*.lua") if path.stem != "common")
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
