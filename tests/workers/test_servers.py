"""The private Redis starts wherever its folder lies, and leaves no process behind when it does not; who answers
for a host."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import psutil
import pytest
import redis
from saggar.workers import servers
from saggar.workers.health import of_host
from saggar.workers.servers import RedisServer, ServerError

from tests.support.cluster import until


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["valkey", "redis"])
@pytest.mark.parametrize("name", ["plain", "a 'data' folder", 'with "quotes" and \\ #', "ümlaut"])
def test_any_folder_will_do(tmp_path: Path, name: str, kind: servers.Kind) -> None:
    server = RedisServer(tmp_path / name, kind)
    with server:
        url = server.url
        with redis.Redis.from_url(url) as client:
            client.set("kept", "yes")
            assert client.config_get("appendfsync") == {"appendfsync": "always"}
        server.stop()
        server.start()
        assert server.url == url
        with redis.Redis.from_url(url) as client:
            assert client.get("kept") == b"yes"
    assert (tmp_path / name / "appendonlydir").is_dir()
    assert (tmp_path / name / "redis.conf").stat().st_mode & 0o777 == 0o600


@pytest.mark.e2e
def test_a_folder_may_move_between_starts(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "here") as server, redis.Redis.from_url(server.url) as client:
        client.set("kept", "yes")
    (tmp_path / "here").rename(tmp_path / "there")
    with RedisServer(tmp_path / "there") as server, redis.Redis.from_url(server.url) as client:
        assert client.get("kept") == b"yes"
    assert not (tmp_path / "here").exists()


@pytest.mark.e2e
def test_a_port_that_another_has_taken_and_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        url = server.url
    port = int(url.rpartition(":")[2].split("/")[0])
    with (
        socket.create_server(("127.0.0.1", port)),
        RedisServer(tmp_path) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        assert server.url != url
        assert client.ping()


def stubborn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A server that writes its pid to the returned file and never answers."""
    binary, pid = tmp_path / "server", tmp_path / "pid"
    binary.write_text(f"#!/bin/sh\necho $$ > '{pid}.new' && mv '{pid}.new' '{pid}'\nexec sleep 600\n")
    binary.chmod(0o755)
    monkeypatch.setattr(servers, "find_binary", lambda kind: str(binary))
    return pid


@pytest.mark.e2e
def test_a_server_that_does_not_answer_in_time_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = stubborn(tmp_path, monkeypatch)
    server = RedisServer(tmp_path / "data")

    def silent() -> bool:
        until(pid.exists, 20, "the server runs")
        return False

    monkeypatch.setattr(server, "_answers", silent)
    with pytest.raises(ServerError, match="did not start"):
        server.start(timeout_s=0)
    assert not psutil.pid_exists(int(pid.read_text()))
    with pytest.raises(ServerError, match="not running"):
        _ = server.pid


@pytest.mark.e2e
def test_an_interrupted_start_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = stubborn(tmp_path, monkeypatch)
    server = RedisServer(tmp_path / "data")

    def interrupt_once_it_runs() -> bool:
        if pid.exists():
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(server, "_answers", interrupt_once_it_runs)
    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert not psutil.pid_exists(int(pid.read_text()))


@pytest.mark.parametrize(
    ("name", "host", "its"),
    [
        ("gen.emoji@node1-77-0a1b2c3d", "node1", True),
        ("chores@node1-77", "node1", True),
        ("gen.emoji@node10-77-0a1b2c3d", "node1", False),
        ("gen.emoji@node1-a-77-0a1b2c3d", "node1", False),
        ("gen.emoji@my-node1-77-0a1b2c3d", "node1", False),
        ("gen.emoji@node1.lan-77-0a1b2c3d", "node1.lan", True),
        ("gen.emoji@node1xlan-77-0a1b2c3d", "node1.lan", False),
        ("gen.emoji@[n]-77-0a1b2c3d", "[n]", True),
        ("gen.emoji@n-77-0a1b2c3d", "[n]", False),
    ],
)
def test_a_worker_answers_for_its_own_host_alone(name: str, host: str, its: bool) -> None:
    assert (re.match(of_host(host), name) is not None) == its
