"""A Redis and an S3 server on this machine, for trying a cluster by hand: python scripts/servers.py FOLDER

Both listen on the loopback address only. FOLDER/env holds what the other shells need: `. FOLDER/env`. Ctrl-C ends both;
their data stays in FOLDER.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from saggar.workers.embedded import FolderLock
from saggar.workers.servers import RedisServer, ServerError

from tests.support.weed import S3Server


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))  # so that the servers are stopped on the way out
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "cluster").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FolderLock(folder / "lock"):
            serve(folder)
    except ServerError as error:
        sys.exit(f"saggar: {error}")


def serve(folder: Path) -> None:
    """Until a signal comes."""
    s3 = S3Server(folder / "s3")
    with RedisServer(folder / "redis") as redis:
        s3.start()
        try:
            values = {"SAGGAR_REDIS_URL": redis.url, "SAGGAR_STORE": f"s3://{s3.bucket}/results", **s3.env}
            environment = folder / "env"
            environment.touch(mode=0o600)
            environment.write_text("".join(f"export {name}='{value}'\n" for name, value in values.items()))
            print(f"Redis and S3 are up. In the other shells:  . {environment}", flush=True)
            signal.pause()
        except KeyboardInterrupt:
            print("stopping ...", flush=True)
        finally:
            s3.stop()


if __name__ == "__main__":
    main()
