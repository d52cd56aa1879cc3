"""The engine's one tree of errors.

EngineError
├── InvalidRequest    the caller's fault: names the field, the reason and what is allowed; final
├── Unsupported       a configuration that cannot be; found at start
├── LoadError         a checkpoint that cannot be read; found at start
├── RowFailed         this request's own encode, step or decode failed; its neighbours went on
├── OutOfMemory       one row alone does not fit in the device
├── WorkerDied        a rank ended while it held this request; another try may succeed
│   └── RanksParted   one rank of several failed where the others did not, so the group was ended
├── Cancelled         ended because its owner asked for it
├── DeadlineExceeded  ended because its time was over
└── EngineClosed      the engine was closed before the request could end

Every class keeps its arguments in `args`, so that an error survives the trip between processes.
"""

from __future__ import annotations

from collections.abc import Mapping


class EngineError(Exception):
    """Whatever the engine raises on purpose."""


class InvalidRequest(EngineError, ValueError):
    """`field` holds what is not allowed; `allowed` says in words what would be."""

    def __init__(self, field: str, message: str, allowed: str = "") -> None:
        super().__init__(field, message, allowed)
        self.field = field
        self.message = message
        self.allowed = allowed

    def __str__(self) -> str:
        hint = f" (allowed: {self.allowed})" if self.allowed else ""
        return f"{self.field}: {self.message}{hint}"


class Unsupported(EngineError):
    """The configuration asks for something that the model or the machine cannot do."""


class LoadError(EngineError):
    """The checkpoint is incomplete, damaged or of a kind that is not loaded."""


class RowFailed(EngineError):
    """The request's own computation raised; the text is the original error's."""


class OutOfMemory(EngineError):
    """A single row does not fit in the device's memory."""


class WorkerDied(EngineError):
    """A rank's process ended; the text says how."""


class RanksParted(WorkerDied):
    """`memory`: it ran out of memory. `row_limits`: the rows of one forward that it learned by that, by batch key."""

    def __init__(self, text: str, memory: bool = False, row_limits: Mapping[str, int] | None = None) -> None:
        super().__init__(text, memory, row_limits)
        self.memory = memory
        self.row_limits = dict(row_limits or {})

    def __str__(self) -> str:
        return str(self.args[0])


class Cancelled(EngineError):
    """The request was cancelled."""


class DeadlineExceeded(EngineError):
    """The request's deadline passed before its end."""


class EngineClosed(EngineError):
    """The engine is closed and takes nothing more."""
