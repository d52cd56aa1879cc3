"""A group of ranks on several nodes, all on this machine: node 0 in the test, agents of the others beside it."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
from saggar.engine import Engine, LoadError
from saggar.engine.config import EngineConfig, Nodes
from saggar.engine.executor.keyed import KEY_VARIABLE

from tests.engine.conftest import MakeEngine
from tests.engine.faults import FOLDER, order
from tests.engine.site import KEY, QUICK, Site, free_port, pour
from tests.engine.support import Recorder, alive, at_step, check_noop, eventually, noop
from tests.support.memory import named_segments


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
    served = engine.health().pids[1]
    site.agents[0].kill()
    eventually(lambda: not alive(served))  # its ranks go with it, a moment later: they could still answer
    handle = engine.submit(noop("a"))
    check_noop(noop("a"), handle.result(30))
    assert set(site.ranks(1)) == {engine.health().pids[1]}


@pytest.mark.procs
def test_several_nodes_leave_nothing(site: Site) -> None:
    site.agent()

    def held() -> tuple[int, int, list[str]]:
        gc.collect()
        me = psutil.Process()
        return me.num_fds(), threading.active_count(), sorted(named_segments())

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
                pour(sock, sent)
        site.agent()
        check_noop(noop("a"), starting.result(60).submit(noop("a")).result(30))
    assert not (site.folder / "unpickled").exists()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
