"""A group of ranks on several nodes, all on this machine: node 0 in the test, agents of the others beside it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
from saggar.engine import Engine, LoadError, Unsupported
from saggar.engine.config import EngineConfig, Nodes, Patience
from saggar.engine.executor import keyed
from saggar.engine.executor.head import Head
from saggar.engine.executor.keyed import KEY_VARIABLE, Gone, Lines, Refused, accept, connect, read_key

from tests.engine.conftest import MakeEngine
from tests.engine.faults import FAULTS, FOLDER, order
from tests.engine.support import Recorder, alive, at_step, check_noop, eventually, noop

ROOT = Path(__file__).parents[2]
KEY = "the key of these nodes alone"
QUICK = Patience(pulse_s=0.1, silence_s=2.0, backoff_s=0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@dataclass
class Site:
    """Engines whose other nodes' agents are started here too."""

    make_engine: MakeEngine
    folder: Path
    count: int = 2
    port: int = field(default_factory=free_port)
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def agent(self, node: int = 1, *flags: str, nodes: int | None = None, key: str = KEY) -> int:
        """An agent's place in `agents`."""
        command = [sys.executable, "-m", "saggar.engine.executor.agent", "--address", self.address]
        command += ["--nodes", str(nodes or self.count), "--node-rank", str(node), *flags]
        with self.log(len(self.agents)).open("ab") as sink:
            environ = os.environ | {KEY_VARIABLE: key}
            self.agents.append(subprocess.Popen(command, env=environ, cwd=ROOT, stdout=sink, stderr=sink))
        return len(self.agents) - 1

    def log(self, agent: int) -> Path:
        return self.folder / f"agent{agent}.log"

    def engine(self, family: str = "noop", ranks: int = 2, **settings: Any) -> Engine:
        own = {"executor": "multiproc", "worker_extension": FAULTS, "patience": QUICK}
        nodes = Nodes(self.count, self.address)
        return self.make_engine(family, ranks=ranks, nodes=nodes, **own | settings)

    def starting(self) -> Future[Engine]:
        """An engine that waits for its nodes, in a thread that nobody waits for."""
        future: Future[Engine] = Future()

        def start() -> None:
            try:
                future.set_result(self.engine())
            except Exception as error:  # noqa: BLE001  (it is whoever asks for the result that hears of it)
                future.set_exception(error)

        threading.Thread(target=start, daemon=True).start()
        return future

    def ranks(self, agent: int = 0) -> list[int]:
        """The processes that an agent has started."""
        try:
            return [child.pid for child in psutil.Process(self.agents[agent].pid).children()]
        except psutil.NoSuchProcess:
            return []


@pytest.fixture
def site(make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    site = Site(make_engine, tmp_path)
    yield site
    for agent in site.agents:
        agent.send_signal(signal.SIGCONT)
        agent.terminate()
    for agent in site.agents:
        agent.wait(30)


@pytest.mark.procs
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_two_nodes_make_the_pictures_of_one_process(site: Site, ranks: int) -> None:
    request = noop("a", num_inference_steps=2)
    (alone,) = site.make_engine("sd3").generate([request])
    site.agent()
    engine = site.engine("sd3", ranks, cfg=ranks)
    assert set(site.ranks()) == set(engine.health().pids[ranks // 2 :])
    (together,) = engine.generate([request])
    np.testing.assert_array_equal(alone.images[0], together.images[0])


@pytest.mark.procs
def test_three_nodes_and_calls_to_each_of_their_ranks(site: Site) -> None:
    site.count = 3
    for node in (2, 1):
        site.agent(node)
    engine = site.engine(ranks=6, worker_extension="tests.engine.support.Echo")
    assert engine.call("pid") == list(engine.health().pids)
    assert engine.call("pid", rank=5) == [engine.health().pids[5]]
    assert {*site.ranks(0), *site.ranks(1)} == set(engine.health().pids[2:])
    requests = [noop(f"r{i}", num_outputs=1 + i % 3, key=str(i % 2)) for i in range(12)]
    for request, output in zip(requests, engine.generate(requests), strict=True):
        check_noop(request, output)


@pytest.mark.procs
def test_a_large_array_of_another_node_comes_whole(site: Site) -> None:
    """There is no memory to share."""
    site.agent()
    engine = site.engine(worker_extension="tests.engine.support.Echo")
    for rank in (0, 1):
        (found,) = engine.call("numbers", 3_000_000, rank=rank)
        np.testing.assert_array_equal(found, np.arange(3_000_000))


@pytest.mark.procs
@pytest.mark.parametrize("how", ["kill", "stop", "raise"])
def test_a_rank_of_another_node_that_fails_takes_its_group_along_and_no_request(site: Site, how: str) -> None:
    site.agent()
    engine = site.engine(ranks=4)
    before = engine.health().pids
    recorder = Recorder()
    requests = [noop("a"), noop("b", prompt=order("predict", how, 3)), noop("c")]
    handles = [engine.submit(request, on_event=recorder) for request in requests]
    for request, handle in zip(requests, handles, strict=True):
        check_noop(request, handle.result(30))
        assert recorder.kinds(request.id).count("output") == 1
    assert not set(before) & set(engine.health().pids)
    eventually(lambda: not any(alive(pid) for pid in before))
    assert site.agents[0].poll() is None
    assert len(site.ranks()) == 2


def running(engine: Engine) -> tuple[Any, Any]:
    """A request under way, and one that waits."""
    started = threading.Event()
    handle = engine.submit(noop("a", steps=400, sleep_s=0.005), on_event=at_step("a", 2, started.set))
    assert started.wait(20)
    return handle, engine.submit(noop("b", key="other"))


@pytest.mark.procs
def test_a_node_that_dies_ends_the_group_until_it_is_back(site: Site) -> None:
    site.agent()
    engine = site.engine(ranks=4)
    before = engine.health().pids
    handle, waiting = running(engine)
    site.agents[0].kill()
    eventually(lambda: not engine.health().ok, timeout_s=3)
    eventually(lambda: not any(alive(pid) for pid in before))
    assert "node 1 is lost" in engine.health().reason
    assert not engine.health().over
    eventually(lambda: engine.room().seats == 0)
    site.agent()
    check_noop(noop("a"), handle.result(30))
    check_noop(noop("b"), waiting.result(30))
    assert engine.health().ok
    assert set(site.ranks(1)) == set(engine.health().pids[2:])


@pytest.mark.procs
def test_a_node_that_falls_silent_is_lost_and_comes_back_by_itself(site: Site) -> None:
    site.agent()
    engine = site.engine()
    before = engine.health().pids
    handle, waiting = running(engine)
    site.agents[0].send_signal(signal.SIGSTOP)
    eventually(lambda: "node 1 is lost: no sign of life" in engine.health().reason)
    eventually(lambda: not alive(before[1]))  # its channel has closed, which needs no agent
    site.agents[0].send_signal(signal.SIGCONT)
    check_noop(noop("a"), handle.result(30))
    check_noop(noop("b"), waiting.result(30))
    assert site.agents[0].poll() is None
    assert set(site.ranks()) == {engine.health().pids[1]}


@pytest.mark.procs
def test_an_agent_outlives_its_engine_and_serves_the_next(site: Site) -> None:
    site.agent()
    for _ in range(2):
        engine = site.engine()
        ranks = site.ranks()
        check_noop(noop("a"), engine.submit(noop("a")).result(30))
        engine.close()
        eventually(lambda: not any(alive(pid) for pid in ranks))  # noqa: B023
        assert site.agents[0].poll() is None
    site.agents[0].terminate()
    assert site.agents[0].wait(20) == 0
    assert "Traceback" not in site.log(0).read_text()


@pytest.mark.procs
def test_an_agent_that_is_told_to_end_ends_its_ranks(site: Site) -> None:
    site.agent()
    engine = site.engine()
    (rank,) = site.ranks()
    site.agents[0].terminate()
    assert site.agents[0].wait(20) == 0
    assert not alive(rank)
    eventually(lambda: not engine.health().ok, timeout_s=3)


@pytest.mark.procs
def test_a_wrong_key_is_refused_and_the_right_one_is_still_awaited(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        starting = site.starting()
        site.agent(key="another key that is long enough")
        assert site.agents[0].wait(30) == 1
        told = site.log(0).read_text()
        assert told.count("ERROR") == 1
        assert "refused by 127.0.0.1" in told
        assert "the head holds another key" in told
        assert not starting.done()
        site.agent()
        check_noop(noop("a"), starting.result(60).submit(noop("a")).result(30))
    assert caplog.text.count("was refused: it holds another key") == 1
    assert KEY not in caplog.text + told + site.log(1).read_text()
    assert "another key that" not in caplog.text + told


@pytest.mark.procs
def test_a_node_of_a_world_of_another_size_stops_the_start(site: Site) -> None:
    site.agent(2, nodes=3)
    with pytest.raises(LoadError, match=r"node 2 at .* was told of 3 nodes; this group has 2"):
        site.engine()
    assert site.agents[0].wait(20) == 1
    assert "was told of 3 nodes" in site.log(0).read_text()


@pytest.mark.procs
def test_a_node_with_other_weights_stops_the_start(site: Site, models: Callable[[str], Path]) -> None:
    other = shutil.copytree(models("noop"), site.folder / "elsewhere")
    agent = site.agent(1, "--model", str(other))
    check_noop(noop("a"), site.engine().submit(noop("a")).result(30))  # the same weights at another place
    site.agents[agent].terminate()
    site.agents[agent].wait(20)
    (other / "more.json").write_text("{}")
    site.port = free_port()
    site.agent(1, "--model", str(other))
    with pytest.raises(LoadError, match="rank 1 differs from rank 0 in its weights"):
        site.engine()


@pytest.mark.procs
def test_a_second_agent_of_the_same_node_waits_for_the_first_ones_end(site: Site) -> None:
    site.agent()
    engine = site.engine()
    site.agent()
    eventually(lambda: "node 1 is here already" in site.log(1).read_text())
    assert engine.health().ok
    site.agents[0].kill()
    handle = engine.submit(noop("a"))
    check_noop(noop("a"), handle.result(30))
    assert set(site.ranks(1)) == {engine.health().pids[1]}


@pytest.mark.procs
def test_several_nodes_leave_nothing(site: Site) -> None:
    site.agent()

    def held() -> tuple[int, int, list[str]]:
        gc.collect()
        me = psutil.Process()
        return me.num_fds(), threading.active_count(), sorted(os.listdir("/dev/shm"))

    def start_and_close(kill: bool) -> None:
        with site.engine() as engine:
            engine.generate([noop("a", height=512, width=512)])
            if kill:
                os.kill(engine.health().pids[1], signal.SIGKILL)
                engine.generate([noop("c")])

    start_and_close(True)
    before = held()
    for time in range(4):
        start_and_close(time % 2 == 0)
    eventually(lambda: held() == before)
    eventually(lambda: site.ranks() == [])
    agent = psutil.Process(site.agents[0].pid)
    assert agent.num_fds() < 20
    assert agent.num_threads() < 4


def test_close_does_not_wait_for_a_node(site: Site) -> None:
    from saggar.engine.errors import EngineClosed
    from saggar.engine.executor.multiproc import MultiprocExecutor

    nodes = Nodes(2, site.address)
    executor = MultiprocExecutor(EngineConfig(model="x", ranks=2, nodes=nodes, patience=QUICK))

    def stop() -> None:
        raise EngineClosed("asked to")

    with pytest.raises(EngineClosed, match="asked to"):
        executor.start(stop)
    executor.close()
    with socket.create_server(("127.0.0.1", site.port)):
        pass  # nobody listens there any more


class Bomb:
    """Whoever unpickles it is told of it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ[FOLDER] + "/unpickled",)


@pytest.mark.procs
def test_what_does_not_hold_the_key_is_neither_parsed_nor_unpickled(site: Site) -> None:
    starting = site.starting()
    eventually(lambda: _answers(site.port))
    with socket.create_connection(("127.0.0.1", site.port)):  # one that is silent holds up nobody
        for sent in (pickle.dumps(Bomb()) * 9, b'{"kind": "node", "node": 1, "nodes": 2}\n' * 9, b""):
            with socket.create_connection(("127.0.0.1", site.port)) as sock:
                _pour(sock, sent)
        site.agent()
        check_noop(noop("a"), starting.result(60).submit(noop("a")).result(30))
    assert not (site.folder / "unpickled").exists()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _pour(sock: socket.socket, data: bytes) -> None:
    """Send all and read all; the other side may throw it back at any moment."""
    with contextlib.suppress(OSError):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass


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
                _pour(sock, b"")

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


@pytest.mark.parametrize("address", ["here", "here:", ":1", "here:0", "here:99999", "here:x"])
def test_an_address_is_host_and_port(address: str) -> None:
    with pytest.raises(Unsupported, match=r"nodes.address must be host:port"):
        Nodes(2, address)
    assert Nodes(2, "[::1]:7001").host == "::1"


def test_an_address_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from saggar.engine.executor.head import Head

    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with pytest.raises(Unsupported, match=r"node 0 cannot listen at 192\.0\.2\.1:7001"):
        Head(Nodes(2, "192.0.2.1:7001"), 1, QUICK)
