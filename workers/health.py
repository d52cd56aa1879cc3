"""Whether this host's worker answers: `python -m saggar.workers.health`, for a container's health check.

Asks by Celery's own ping, which is answered by the very loop that fetches jobs. Another host's worker does not count.
"""

from __future__ import annotations

import re
import socket
import sys

from saggar.jobs.settings import JobSettings
from saggar.workers.app import make_app


def answering(
    settings: JobSettings, host: str, *, at_most: int | None = None, timeout_s: float = 5.0
) -> list[str]:
    """The names of the workers on `host` that answer within the time, or of the first `at_most` of them.

    Raises kombu's OperationalError when Redis is away.
    """
    control = make_app(settings).control
    inspect = control.inspect(pattern=of_host(host), matcher="pcre", timeout=timeout_s, limit=at_most)
    return sorted(inspect.ping() or {})


def of_host(host: str) -> str:
    """The regular expression of a host's workers' names: `lane@host-pid` or `lane@host-pid-random`, to the end."""
    return rf".*@{re.escape(host)}-[0-9]+(-[0-9a-f]+)?\Z"


def main() -> int:
    """0 and the workers' names, or 1."""
    names = answering(JobSettings.from_env(), socket.gethostname(), at_most=1)
    print("\n".join(names) if names else "no worker of this host answers")
    return 0 if names else 1


if __name__ == "__main__":
    sys.exit(main())
