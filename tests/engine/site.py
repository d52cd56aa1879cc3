"""Several nodes on this machine, for tests: an engine, and agents beside it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from saggar.engine import Engine
from saggar.engine.config import Nodes, Patience
from saggar.engine.executor.keyed import KEY_VARIABLE

from tests.engine.conftest import MakeEngine
from tests.engine.faults import FAULTS

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


def pour(sock: socket.socket, data: bytes) -> None:
    """Send all and read all; the other side may throw it back at any moment."""
    with contextlib.suppress(OSError):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
