"""Storage: where results go. S3 and a local folder behind one contract, keys, manifests written once, the spool.

    from saggar.storage import open_storage
    storage = open_storage("s3://bucket/results")  # settings from SAGGAR_S3_*, credentials by boto3's own chain
    storage.presign(key_of(storage, output.uri))  # a link to what a job has made

Cheap to import: boto3 comes with the first S3 store that is opened.
"""

from saggar.storage.base import ObjectInfo, Storage, StorageSettings, key_of, open_storage
from saggar.storage.errors import (
    Conflict,
    InvalidKey,
    NotFound,
    SpoolFull,
    StorageConfigError,
    StorageDenied,
    StorageError,
    StorageRefused,
    StorageUnavailable,
)

__all__ = [
    "Conflict",
    "InvalidKey",
    "NotFound",
    "ObjectInfo",
    "SpoolFull",
    "Storage",
    "StorageConfigError",
    "StorageDenied",
    "StorageError",
    "StorageRefused",
    "StorageSettings",
    "StorageUnavailable",
    "key_of",
    "open_storage",
]
