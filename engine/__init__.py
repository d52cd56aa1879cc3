"""Diffusion inference: requests in, arrays out. Importing this imports neither torch nor a queue."""

from saggar.engine.config import EngineConfig
from saggar.engine.engine import Engine
from saggar.engine.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineClosed,
    EngineError,
    InvalidRequest,
    LoadError,
    OutOfMemory,
    RowFailed,
    Unsupported,
    WorkerDied,
)
from saggar.engine.handle import Handle, Reservation
from saggar.engine.models.registry import families, installed, open_family
from saggar.engine.request import EngineEvent, ModelInfo, Output, ParamValue, Request, Room, TextCut

__all__ = [
    "Cancelled",
    "DeadlineExceeded",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineError",
    "EngineEvent",
    "Handle",
    "InvalidRequest",
    "LoadError",
    "ModelInfo",
    "OutOfMemory",
    "Output",
    "ParamValue",
    "Request",
    "Reservation",
    "Room",
    "RowFailed",
    "TextCut",
    "Unsupported",
    "WorkerDied",
    "families",
    "installed",
    "open_family",
]
