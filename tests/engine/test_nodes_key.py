"""What nodes say to each other before they trust: the key, the handshake, addresses."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from saggar.engine import Unsupported
from saggar.engine.config import EngineConfig, Nodes
from saggar.engine.executor import keyed
from saggar.engine.executor.head import Head
from saggar.engine.executor.keyed import KEY_VARIABLE, Gone, Lines, Refused, accept, connect, read_key

from tests.engine.site import KEY, QUICK, free_port, pour
from tests.engine.support import eventually


def meet(head: bytes, node: bytes) -> tuple[object, object]:
    """What both sides make of each other: a socket, or an error."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def answer() -> socket.socket:
            return accept(listener.accept()[0], head)

        answering = pool.submit(answer)
        try:
            mine: object = connect(listener.getsockname(), node)
        except Refused as refused:
            mine = refused
        return answering.exception() or answering.result(), mine


def test_both_sides_prove_the_key() -> None:
    for one in meet(b"a" * 16, b"b" * 16):
        assert isinstance(one, Refused), one
    head, node = meet(b"a" * 16, b"a" * 16)
    assert isinstance(head, socket.socket)
    assert isinstance(node, socket.socket)
    there, here = Lines(head), Lines(node)
    there.send(a=1)
    there.send(b=[2])
    assert (here.receive(5), here.receive(5), here.receive(0)) == ({"a": 1}, {"b": [2]}, None)
    there.close()
    here.close()


def test_a_handshake_has_an_end_however_slowly_it_is_spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever sends a byte now and then holds the place of a node for hours."""
    monkeypatch.setattr(keyed, "HANDSHAKE_S", 0.3)
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        sock = socket.create_connection(listener.getsockname())

        def drip() -> None:
            with contextlib.suppress(OSError), sock:
                while not stop.wait(0.1):
                    sock.sendall(b"x")

        dripping = pool.submit(drip)
        try:
            with pytest.raises(Refused, match="timed out"):
                accept(listener.accept()[0], KEY.encode())
        finally:
            stop.set()
        dripping.result()


@pytest.mark.parametrize("said", [b"[1]\n", b"null\n", b"[" * 100_000 + b"\n"])
def test_what_is_no_object_ends_the_connection(said: bytes) -> None:
    here, there = socket.socketpair()
    with there:
        there.sendall(said)
        lines = Lines(here)
        with pytest.raises(Gone, match="the other side does not speak"):
            lines.receive(5)
        lines.close()


def test_a_head_without_descriptors_goes_on_listening(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    address = ("127.0.0.1", free_port())
    head = Head(Nodes(2, f"127.0.0.1:{address[1]}"), 1, QUICK)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sock = socket.socket()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (sock.fileno() + 1, hard))
        sock.connect(address)
        eventually(lambda: "could not be accepted" in caplog.text)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        connect(address, KEY.encode()).close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        sock.close()
        head.close()


def test_a_head_without_the_key_is_not_believed() -> None:
    """It repeats what the node said, and says yes to everything."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def pretend() -> None:
            with listener.accept()[0] as sock:
                sock.sendall(b"saggar nodes 1\n\0" + b"n" * 32)
                told = sock.recv(64, socket.MSG_WAITALL)
                sock.sendall(b"\1" + told[32:])
                pour(sock, b"")

        pretending = pool.submit(pretend)
        with pytest.raises(Refused, match="the head does not hold this node's key"):
            connect(listener.getsockname(), b"a" * 16)
        pretending.result()


def test_where_the_key_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(Unsupported, match="SAGGAR_NODE_KEY: the nodes need a shared key of at least 16"):
        read_key(None)
    monkeypatch.setenv(KEY_VARIABLE, f" {KEY}\n")
    assert read_key(None) == KEY.encode()
    (tmp_path / "key").write_text("short")
    with pytest.raises(Unsupported, match="at least 16 characters"):
        read_key(str(tmp_path / "key"))
    with pytest.raises(Unsupported, match="cannot be read"):
        read_key(str(tmp_path / "none"))
    (tmp_path / "key").write_text("k" * 32 + "\n")
    assert read_key(str(tmp_path / "key")) == b"k" * 32


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"ranks": 3}, "3 ranks cannot be shared evenly by 2 nodes"),
        ({"ranks": 2, "replicas": 2}, "hold one replica"),
        ({"ranks": 1}, "1 ranks cannot be shared evenly"),
    ],
)
def test_what_several_nodes_cannot_be(how: dict[str, Any], what: str) -> None:
    with pytest.raises(Unsupported, match=what):
        EngineConfig(model="x", nodes=Nodes(2, "here:7001"), **how)


@pytest.mark.parametrize("address", ["here", "here:", ":1", "here:0", "here:99999", "here:x", "here:²"])
def test_an_address_is_host_and_port(address: str) -> None:
    with pytest.raises(Unsupported, match=r"nodes.address must be host:port"):
        Nodes(2, address)
    assert Nodes(2, "[::1]:7001").host == "::1"


def test_an_address_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from saggar.engine.executor.head import Head

    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with pytest.raises(Unsupported, match=r"node 0 cannot listen at 192\.0\.2\.1:7001"):
        Head(Nodes(2, "192.0.2.1:7001"), 1, QUICK)
