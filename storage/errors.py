"""The errors of storage, one tree.

StorageError
├── StorageConfigError   a wrong URL or setting, or a missing extra: found at start
├── InvalidKey           a key, prefix or job id that could leave its place (empty part, `..`, odd characters)
├── NotFound             no object under that key
├── Conflict             a key that is written once holds something else, or something damaged
├── SpoolFull            the local spool has no room now; it has again once uploads have gone through
├── StorageUnavailable   try again: 5xx, 408, 429, a slow-down, a connection that failed
└── StorageRefused       final: any other refusal (permissions, no such bucket, bad request)
    └── StorageDenied    it refuses this process, whatever it asks for: credentials, an expired token, the clock
"""

from __future__ import annotations


class StorageError(Exception):
    """The root: catch this to catch everything that storage raises on purpose."""


class StorageConfigError(StorageError):
    """A URL or a setting that cannot work."""


class InvalidKey(StorageError):
    """A key that is refused before any store sees it."""


class NotFound(StorageError):
    """No object has this key."""


class Conflict(StorageError):
    """What lies under a write-once key is not what the caller may accept."""


class SpoolFull(StorageError):
    """`needed` bytes do not fit into the `room` bytes that the spool has left."""

    def __init__(self, needed: int, room: int) -> None:
        super().__init__(f"the spool has room for {room} bytes, not for {needed}")
        self.needed = needed
        self.room = room


class StorageUnavailable(StorageError):
    """The store cannot answer now; the same call may succeed later."""


class StorageRefused(StorageError):
    """The store said no, and will say so again."""

    def __init__(self, message: str, *, code: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class StorageDenied(StorageRefused):
    """The store refuses whoever asks, not what is asked for: once credentials or clock are right it may answer."""
