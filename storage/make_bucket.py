"""Make a store ready for its first job: `python -m saggar.storage.make_bucket [URL]`, by default SAGGAR_STORE.

Creates the bucket where there is none, and waits until a PUT succeeds: a server's port opens before it can store.
"""

from __future__ import annotations

import os
import sys
import time

from saggar.storage.base import Storage, open_storage
from saggar.storage.errors import StorageError
from saggar.storage.retry import Backoff, retrying
from saggar.storage.s3 import S3Storage


def make_ready(storage: Storage, timeout_s: float = 120.0) -> bool:
    """Create the bucket and probe it; whether the store has conditional PUT. A folder is ready as it is.

    Raises the last StorageUnavailable after `timeout_s` seconds, StorageRefused at once.
    """
    deadline = time.monotonic() + timeout_s

    def attempt() -> bool:
        if isinstance(storage, S3Storage):
            storage.make_bucket()
        return storage.probe()

    return retrying(attempt, lambda _: time.monotonic() < deadline, backoff=Backoff(cap_s=2.0))


def main(arguments: list[str]) -> int:
    """0 when the store is ready; 1 with a line on standard error when it is not."""
    try:
        url = arguments[0] if arguments else os.environ.get("SAGGAR_STORE", "")
        storage = open_storage(url)
        conditional = make_ready(storage)
    except StorageError as error:
        print(f"make_bucket: {error}", file=sys.stderr)
        return 1
    print(f"{storage.url} is ready, {'with' if conditional else 'WITHOUT'} conditional PUT")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
