"""Lanes: keyed, leased queues in Redis, and the kombu transport `saggar://` that serves Celery from them.

Importing this package is cheap: redis, kombu and celery are imported when a name that needs them is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from saggar.jobs.lanes.appetite import Appetite, LateAppetite, PrefetchAppetite, Want
from saggar.jobs.lanes.message import (
    PRIORITY_CLASSES,
    LaneMessage,
    Tag,
    celery_message,
    lane_base,
    lane_name,
)
from saggar.jobs.lanes.script import LANE_LIB

if TYPE_CHECKING:
    from saggar.jobs.lanes.broker import broker_url, lanes_of, register
    from saggar.jobs.lanes.lanes import Lanes
    from saggar.jobs.lanes.store import Batch, DeadLetter, Delivery, LaneSettings, LaneSize, LaneStore

__all__ = [
    "LANE_LIB",
    "PRIORITY_CLASSES",
    "Appetite",
    "Batch",
    "DeadLetter",
    "Delivery",
    "LaneMessage",
    "LaneSettings",
    "LaneSize",
    "LaneStore",
    "Lanes",
    "LateAppetite",
    "PrefetchAppetite",
    "Tag",
    "Want",
    "broker_url",
    "celery_message",
    "lane_base",
    "lane_name",
    "lanes_of",
    "register",
]

_LATE = {
    "Lanes": "lanes",
    **dict.fromkeys(("broker_url", "lanes_of", "register"), "broker"),
    **dict.fromkeys(("Batch", "DeadLetter", "Delivery", "LaneSettings", "LaneSize", "LaneStore"), "store"),
}


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
