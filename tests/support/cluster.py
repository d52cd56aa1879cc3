"""Real worker processes for end-to-end tests, started through the command line as a user would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from saggar.jobs.cards import Cards
from saggar.jobs.record import JobRecord
from saggar.jobs.settings import JobSettings, connect

from tests.support.wait import until as until  # noqa: PLC0414  (passed on)


def noop_model(folder: Path) -> Path:
    """A checkpoint of the family without a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model_index.json").write_text('{"_class_name": "NoopPipeline"}')
    return folder


@dataclass
class WorkerProcess:
    """`saggar worker` over a model, a Redis and a store. `process` is the supervisor's."""

    redis_url: str
    store: str
    model: str
    log: Path
    flags: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)

    def start(self) -> WorkerProcess:
        """Starts it and does not wait."""
        command = [sys.executable, "-m", "saggar.workers.cli", "worker", "--store", self.store, *self.flags]
        if self.model:
            command += ["--model", self.model]
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(
                command,
                env=os.environ | {"SAGGAR_REDIS_URL": self.redis_url} | self.environ,
                stdout=sink,
                stderr=sink,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self

    def ready(self, name: str, workers: int = 1, timeout_s: float = 60.0) -> WorkerProcess:
        """Waits until `workers` workers serve the model of this name."""
        settings = JobSettings(redis_url=self.redis_url)
        client = connect(settings)
        cards = Cards(client, settings)
        try:
            until(
                lambda: self._alive() and len(cards.workers_of(name)) >= workers,
                timeout_s,
                f"{name} being served",
            )
        finally:
            client.close()
        return self

    def _alive(self) -> bool:
        assert self.process.poll() is None, f"the worker ended:\n{self.log.read_text()[-3000:]}"
        return True

    def child(self) -> psutil.Process:
        """The Celery process under the supervisor."""
        return until(
            lambda: next(iter(psutil.Process(self.process.pid).children()), None), what="a child process"
        )

    def has(self, record: JobRecord) -> bool:
        """Whether it has this job in hand, or had it last."""
        return f":{self.child().pid}:" in (record.owner or "")

    def family(self) -> list[psutil.Process]:
        """The supervisor and everything under it."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def terminate(self, timeout_s: float = 60.0) -> int:
        """SIGTERM; the exit status."""
        self.process.terminate()
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL of the whole family, as a power cut would."""
        for process in self.family():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.wait(10)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            try:
                self.terminate()
            except subprocess.TimeoutExpired:
                self.kill()
