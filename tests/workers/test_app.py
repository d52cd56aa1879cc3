"""The application's two connections, of broker and results, for every form of a Redis URL."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from ssl import CERT_NONE, CERT_REQUIRED

import pytest
from saggar.jobs.lanes import celery_message
from saggar.jobs.lanes.broker import lanes_of
from saggar.jobs.settings import JobSettings, connect
from saggar.workers.app import CHORES_QUEUE, make_app
from saggar.workers.servers import find_binary

from tests.support.cluster import until

TCP = {"host": "host", "port": 6379, "username": None, "password": None, "db": 0, "path": None}
SOCKET = {"host": None, "path": "/run/redis.sock", "username": None, "password": None, "db": 0}
FORMS: dict[str, dict[str, object]] = {
    "redis://host": TCP,
    "redis://user:p%40w@host:7000/3": TCP | {"port": 7000, "username": "user", "password": "p@w", "db": 3},
    "redis://:p%40w@host/1": TCP | {"password": "p@w", "db": 1},
    "rediss://host:6380/2": TCP | {"port": 6380, "db": 2, "ssl_cert_reqs": CERT_REQUIRED},
    "rediss://host?ssl_cert_reqs=none&ssl_ca_certs=/ca": TCP
    | {"ssl_cert_reqs": CERT_NONE, "ssl_ca_certs": "/ca"},
    "unix:///run/redis.sock": SOCKET,
    "unix:///run/redis.sock?db=4": SOCKET | {"db": 4},
    "unix://user:p%40w@/run/redis.sock?db=4": SOCKET | {"username": "user", "password": "p@w", "db": 4},
}


@pytest.mark.parametrize("url", FORMS)
def test_results_go_where_the_url_says(url: str) -> None:
    backend = make_app(JobSettings.make(redis_url=url)).backend
    assert {name: backend.connparams.get(name) for name in FORMS[url]} == FORMS[url]


@pytest.fixture
def socket_url(tmp_path: Path) -> Iterator[str]:
    """A server that is reached by a Unix socket alone, with a password that a URL must quote."""
    path = tmp_path / "r.sock"
    options = ["--port", "0", "--unixsocket", str(path), "--requirepass", "p@w:/", "--dir", str(tmp_path)]
    with subprocess.Popen([find_binary(), *options, "--save", ""], stdout=subprocess.DEVNULL) as server:
        until(path.exists)
        yield f"unix://:p%40w%3A%2F@{path}?db=3"
        server.terminate()


@pytest.mark.e2e
def test_a_unix_socket_for_real(socket_url: str) -> None:
    settings = JobSettings.make(redis_url=socket_url)
    app = make_app(settings)
    with connect(settings) as client:
        app.backend.store_result("j", {"a": 1}, "SUCCESS")
        assert app.AsyncResult("j").get(timeout=20) == {"a": 1}
        lanes_of(app).put(celery_message("t", "j", "gen.m", priority_class=2, batch_key="k", rows=1))
        app.send_task("t", queue=CHORES_QUEUE)
        assert client.exists("celery-task-meta-j", "saggar:gen.m:m", f"saggar:{CHORES_QUEUE}") == 3
    with connect(JobSettings.make(redis_url=socket_url.replace("db=3", "db=0"))) as other:
        assert other.dbsize() == 0  # all of it is in the database that was asked for
    app.close()
