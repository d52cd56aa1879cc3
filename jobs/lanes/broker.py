"""The door to kombu: the transport's name, the URL it wants, and the one `Lanes` of a process for each Redis.

The registry is process-wide on purpose: what a process holds outlives kombu's connections and channels, so
they find it here. It is keyed by process id, for a forked child holds nothing.
"""

import atexit
import logging
import os
import threading
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, parse_qsl, urlsplit, urlunsplit

from saggar.jobs.lanes.lanes import Lanes

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

TRANSPORT: Final = "saggar"
_CONNECT_TIMEOUT_S: Final = 3.0
_SOCKET_TIMEOUT_S: Final = 5.0
_lanes: dict[tuple[object, ...], Lanes] = {}
_lock = threading.Lock()


def register() -> None:
    """Makes `saggar://` known to kombu. Before a Celery application connects; more than once does no harm."""
    from kombu.transport import TRANSPORT_ALIASES

    TRANSPORT_ALIASES[TRANSPORT] = "saggar.jobs.lanes.transport:Transport"


def broker_url(redis_url: str) -> str:
    """The transport's URL of a Redis. rediss:// also needs `broker_use_ssl` (see `broker_use_ssl`)."""
    parts = urlsplit(redis_url)
    if parts.scheme == "unix":
        return f"{TRANSPORT}+{_socket_url(parts)}"
    return urlunsplit((TRANSPORT, parts.netloc, parts.path, "", ""))


def broker_use_ssl(redis_url: str) -> dict[str, object] | None:
    """Celery's setting of that name: certificates are checked unless the URL says ssl_cert_reqs=none."""
    parts = urlsplit(redis_url)
    if parts.scheme != "rediss":
        return None
    options = {name: value for name, value in parse_qsl(parts.query) if name.startswith("ssl_")}
    return {"ssl_cert_reqs": "required", **options}


def backend_url(redis_url: str) -> str:
    """Celery's `result_backend` of a Redis. rediss:// also needs `redis_backend_use_ssl`: `backend_use_ssl`."""
    parts = urlsplit(redis_url)
    if parts.scheme == "unix":
        return f"redis+{_socket_url(parts)}"
    return urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))


def backend_use_ssl(redis_url: str) -> dict[str, object] | None:
    """Celery's `redis_backend_use_ssl`: as for the broker."""
    return broker_use_ssl(redis_url)


def _socket_url(parts: SplitResult) -> str:
    """As kombu and Celery call a Unix socket. User and password are quoted already, and stay so."""
    db = dict(parse_qsl(parts.query)).get("db", "0")
    login, _, _ = parts.netloc.rpartition("@")
    return f"socket://{login and login + '@'}{parts.path}?virtual_host={db}"


def lanes_of(app: "Celery") -> Lanes:
    """This process's lanes of the Redis that is the application's broker. Connects."""
    with app.connection_for_write() as connection:
        lanes: Lanes = connection.default_channel.lanes
        return lanes


def process_lanes(connparams: dict[str, Any], prefix: str, heartbeat_s: float, urgent_seats: int) -> Lanes:
    """This process's lanes of the Redis at `connparams` (redis-py's arguments); made at first use."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    place = (connparams.get(name) for name in ("host", "port", "path", "db", "username"))
    key = (os.getpid(), *place, prefix)
    with _lock:
        if key not in _lanes:
            own = {
                **connparams,
                "max_connections": None,
                "socket_timeout": connparams.get("socket_timeout") or _SOCKET_TIMEOUT_S,
                "retry": Retry(NoBackoff(), 1),
            }
            if "path" not in own:
                own["socket_connect_timeout"] = connparams.get("socket_connect_timeout") or _CONNECT_TIMEOUT_S
            client = redis.Redis(connection_pool=redis.ConnectionPool(**own))
            _lanes[key] = Lanes(client, prefix, heartbeat_s=heartbeat_s, urgent_seats=urgent_seats)
        return _lanes[key]


@atexit.register
def _give_back_at_exit() -> None:
    """Pool threads have ended by now: whatever is still held, nobody works on."""
    for key, lanes in _lanes.items():
        if key[0] == os.getpid() and lanes.in_hand():
            logger.warning("returned %d messages at exit", lanes.give_back(everything=True))
