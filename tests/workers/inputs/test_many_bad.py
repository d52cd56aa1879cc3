"""Two hundred bad jobs beside good ones: each has its own end, and the worker keeps nothing of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from saggar.jobs.client import JobClient
from saggar.storage.base import Storage
from saggar.workers.inputs.decoders import MOST

from tests.support.cluster import WorkerProcess, until
from tests.support.inputs import BAD_IMAGES, image
from tests.support.web import WebServer
from tests.workers.inputs.test_worker import ended, put, start, store, submit, web  # noqa: F401  (fixtures)

pytestmark = pytest.mark.e2e

FROM_WEB = ("/missing", "/endless", "/short", "/broken", "/packed", "/loop", "/half", "/dripping")


def decoders_of(worker: WorkerProcess) -> list[psutil.Process]:
    return [one for one in worker.child().children() if is_decoder(one)]


def is_decoder(process: psutil.Process) -> bool:
    """No: it may also have ended between being listed and being looked at."""
    try:
        return (
            process.status() != psutil.STATUS_ZOMBIE and "saggar.workers.inputs.decoder" in process.cmdline()
        )
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def kill_one(worker: WorkerProcess) -> None:
    for decoder in decoders_of(worker)[:1]:
        with suppress(psutil.NoSuchProcess):  # it ended by itself
            decoder.kill()


def left_of_jobs(worker: WorkerProcess) -> list[str]:
    """Files without a name, in memory and on the disk, that the worker has open."""
    opened = Path(f"/proc/{worker.child().pid}/fd")
    links = [os.readlink(one) for one in opened.iterdir() if one.is_symlink()]
    return [link for link in links if link.endswith("(deleted)")]


def test_two_hundred_bad_jobs_leave_nothing_behind(
    start: Callable[..., WorkerProcess],  # noqa: F811
    client: JobClient,
    store: Storage,  # noqa: F811
    web: WebServer,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Three decoders are killed on the way, as the system does when memory is short."""
    (tmp_path / "tmp").mkdir()
    limits = {"SAGGAR_INPUTS_TIMEOUT_S": "1", "SAGGAR_INPUTS_MAX_BYTES": "1000000"}
    worker = start("noop", **limits, TMPDIR=str(tmp_path / "tmp"))
    good = put(store, "good.png", image(size=(600, 400)))
    bad = [put(store, f"{n}.bin", make()) for n, (make, _) in enumerate(BAD_IMAGES.values())]
    bad += [web.url(path) for path in FROM_WEB]

    def do(times: int, kill_after: Collection[int] = ()) -> None:
        failing, fine = [], []
        for n in range(times):
            failing.append(submit(client, "noop", "i2i", {"image": [good, bad[n % len(bad)]]}))
            if n % 3 == 0:
                fine.append(submit(client, "noop", "i2i", {"image": [good, good]}))
        for n, job_id in enumerate(failing, 1):
            error = ended(client, job_id).error
            assert error is not None and error.message.startswith("inputs.image[1]: "), error
            if n in kill_after:
                kill_one(worker)
        for job_id in fine:
            record = ended(client, job_id)
            assert record.state == "succeeded", record.error

    do(len(bad))
    child = worker.child().pid
    files, threads = worker.child().num_fds(), worker.child().num_threads()
    do(200, kill_after=(50, 100, 150))
    until(lambda: left_of_jobs(worker) == [], what="its files being closed")
    # Celery's pool begins a thread for what leaves the plain way and keeps some, each with its connection to Redis.
    until(lambda: worker.child().num_fds() < files + 200 // 10, what="its descriptors")
    until(lambda: worker.child().num_threads() < threads + 200 // 10, what="its threads")
    assert len(decoders_of(worker)) <= MOST
    assert os.listdir(tmp_path / "tmp") == []
    assert worker.child().pid == child, "the worker was not started anew"
    assert "Traceback" not in worker.log.read_text()
    assert worker.terminate() == 0
