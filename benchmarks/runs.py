"""A run without a model: rows a second from manifest to last result, the client's memory, pages of a long queue.

    python -m benchmarks.runs [--rows 10000] [--workers 2] [--queued 100000]

Starts its own Valkey and workers; results go to a local folder, the target. One line puts a run of a family that
sleeps for its steps beside the engine alone with the same requests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
from saggar.engine.config import EngineConfig
from saggar.engine.engine import Engine
from saggar.engine.request import Request
from saggar.jobs.client import JobClient
from saggar.jobs.runs import Run, RunLedger
from saggar.jobs.settings import connect
from saggar.workers.servers import RedisServer

from benchmarks.queue import job, publish
from benchmarks.report import percentile, table
from tests.support.cluster import WorkerProcess, noop_model

Row = tuple[str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--queued", type=int, default=100_000)
    parser.add_argument("--paced", type=int, default=400, help="rows of the run whose family sleeps")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, RedisServer(Path(name) / "redis") as server:
        folder = Path(name)
        noop = noop_model(folder / "noop")
        with JobClient(server.url) as client:
            publish(client.settings, noop)
            rows = [*flat(folder, server.url, noop, asked.rows // 10, asked.workers)]
            rows += flat(folder, server.url, noop, asked.rows, asked.workers)
            rows.append(paced(folder, server.url, noop, asked.paced))
            rows.append(pages(client, asked.queued))
        print(table("Runs, no-op family", ("what", "measured", "goal"), rows))


def flat(folder: Path, url: str, noop: Path, count: int, workers: int) -> list[Row]:
    """Planned, queued and finished, with the client's largest memory on the way."""
    file = folder / f"n{count}.jsonl"
    file.write_text(
        "".join(
            json.dumps({"prompt": f"number {n}", "seed": n, "params": {"steps": 1}}) + "\n"
            for n in range(count)
        )
    )
    seconds, memory, ended = _run(folder, url, noop, file, workers)
    kilobytes = _redis_kilobytes(url)
    return [
        (
            f"{count:,} rows, {workers} workers, local folder",
            f"{ended.done / ended.spent_s:,.0f}/s; {ended.done / seconds:,.0f}/s with planning and report",
            "400/s",
        ),
        (
            f"client of {count:,} rows",
            f"{memory:.0f} MB at most; {kilobytes:,.0f} KB of Redis afterwards",
            "flat",
        ),
    ]


def paced(folder: Path, url: str, noop: Path, count: int) -> Row:
    """Batches of eight that sleep 20 ms a step, ten steps: the engine is busy, and all else must hide behind it."""
    params = {"steps": 10, "sleep_s": 0.02}
    file = folder / "paced.jsonl"
    file.write_text(
        "".join(
            json.dumps({"prompt": f"number {n}", "seed": n, "params": params}) + "\n" for n in range(count)
        )
    )
    _, _, ended = _run(folder, url, noop, file, 1)
    run_rate = ended.done / ended.spent_s
    with Engine.make(EngineConfig(model=str(noop), executor="local", max_batch=8)) as engine:
        began = time.perf_counter()
        handles = [
            engine.submit(Request(id=f"r{n}", task="t2i", prompt=f"number {n}", seed=n, params=params))
            for n in range(count)
        ]
        for handle in handles:
            handle.result()
        alone = count / (time.perf_counter() - began)
    return (
        f"run of {count} rows that sleep 200 ms a batch",
        f"{run_rate:.1f}/s; engine alone {alone:.1f}/s: {run_rate / alone:.1%}",
        "97 %",
    )


def pages(client: JobClient, count: int) -> Row:
    for outcome in client.submit_many({**job(n), "run": "long"} for n in range(count)):
        assert not isinstance(outcome, Exception), outcome
    times = []
    cursor: str | None = None
    for _ in range(500):
        began = time.perf_counter()
        page = client.list(state="queued", run="long", cursor=cursor)
        times.append(time.perf_counter() - began)
        assert len(page.records) == 100
        cursor = page.cursor
    middle, tail = percentile(times, 0.5) * 1e3, percentile(times, 0.99) * 1e3
    return (
        f"a page of 100 of {count:,} queued jobs, {len(times)} pages",
        f"median {middle:.1f} ms, p99 {tail:.1f} ms",
        "100 ms",
    )


def _run(folder: Path, url: str, noop: Path, file: Path, workers: int) -> tuple[float, float, Run]:
    """Seconds of the command, its largest memory (MB), and how the run ended."""
    store = folder / f"store-{file.stem}"
    with ExitStack() as stack:
        started = [
            stack.enter_context(_worker(folder, url, noop, store, f"{file.stem}-{number}").start())
            for number in range(workers)
        ]
        started[0].ready("noop", workers=workers)
        command = ["run", str(file), "--redis", url, "--model", "noop", "--to", str(store)]
        began = time.perf_counter()
        client = subprocess.Popen(
            [sys.executable, "-m", "saggar.workers.cli", *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        largest = 0.0
        process = psutil.Process(client.pid)
        while client.poll() is None:
            largest = max(largest, _resident(process))
            time.sleep(0.05)
        seconds = time.perf_counter() - began
        assert client.returncode == 0
    with JobClient(url) as jobs:
        connection = connect(jobs.settings)
        ended = RunLedger(connection, jobs.settings).get(file.stem)
        connection.close()
    return seconds, largest, ended


def _resident(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss) / 2**20
    except psutil.NoSuchProcess:
        return 0.0


def _redis_kilobytes(url: str) -> float:
    with JobClient(url) as client:
        connection = connect(client.settings)
        used = int(re.sub(r"\D", "", str(connection.info("memory")["used_memory_dataset"])))
        connection.close()
    return used / 1024


def _worker(folder: Path, url: str, noop: Path, store: Path, name: str) -> WorkerProcess:
    flags = ("--executor", "local", "--spool", str(folder / "spool"), "--log-level", "error")
    return WorkerProcess(url, str(store), str(noop), folder / f"{name}.log", flags, dict(os.environ))


if __name__ == "__main__":
    main()
