"""The queue without a model: submits, jobs through one worker, event lag, bytes, an idle worker, claims.

    python -m benchmarks.queue [--jobs 5000]

Starts its own Valkey and workers. The baseline of the same run is a plain Celery worker on kombu's own Redis transport
with a task that does nothing: what the ledger, the lane, the engine and the files cost on top.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from saggar.engine.models.registry import open_family
from saggar.jobs.cards import Cards
from saggar.jobs.client import JobClient
from saggar.jobs.lanes import LaneStore, celery_message
from saggar.jobs.settings import JobSettings, connect
from saggar.workers.servers import RedisServer
from saggar.workers.translate import to_card

from benchmarks.report import percentile, table
from tests.support.cluster import WorkerProcess, noop_model, until

Row = tuple[str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=5000, help="jobs of the throughput runs")
    count = parser.parse_args().jobs
    with tempfile.TemporaryDirectory() as name, RedisServer(Path(name) / "redis") as server:
        folder = Path(name)
        noop = noop_model(folder / "noop")
        client = JobClient(server.url)
        publish(client.settings, noop)
        rows = [submits(client, server.url, count)]
        through, rate = jobs_through(client, server.url, folder, noop, count)
        rows += through
        rows += [plain_celery(server.url, folder, count, rate)]
        rows += [idle(server.url, folder, noop), event_lag(client, server.url, folder, noop)]
        client.close()
        print(table("Queue, no-op family", ("what", "measured", "goal"), rows))
        print(
            table(
                "Claims",
                ("messages", "keys", "put µs", "fetch µs a message", "ack µs"),
                list(claims(server.url)),
            )
        )


def publish(settings: JobSettings, noop: Path) -> None:
    """The card that a worker would publish, so that jobs can be queued before one runs."""
    connection = connect(settings)
    cards = Cards(connection, settings)
    cards.publish(to_card(open_family(str(noop)).info("noop", 8, ""), "noop", 8), "benchmark")
    cards.leave("noop", "benchmark")
    connection.close()


def job(number: int) -> dict[str, object]:
    return {"model": "noop", "prompt": f"a picture, number {number}", "params": {"steps": 1}, "seed": number}


def submits(client: JobClient, url: str, count: int) -> Row:
    server = redis.Redis.from_url(url)
    before = server.info("memory")["used_memory"]
    began = time.perf_counter()
    for outcome in client.submit_many(job(number) for number in range(count)):
        assert not isinstance(outcome, Exception), outcome
    rate = count / (time.perf_counter() - began)
    kilobytes = (server.info("memory")["used_memory"] - before) / count / 1024
    server.close()
    return (
        "submits, batches of 500",
        f"{rate:,.0f}/s; {kilobytes:.2f} KB of Redis a waiting job",
        "5,000/s; 3 KB",
    )


def jobs_through(
    client: JobClient, url: str, folder: Path, noop: Path, count: int
) -> tuple[list[Row], float]:
    """From the first start to the last record of `count` jobs that wait already, for one worker and local storage."""
    with worker(url, folder, noop) as process:
        process.ready("noop")
        until(lambda: client.counts()["succeeded"] == count, 600)
    connection = connect(client.settings)
    stamps = connection.zrange(f"{client.settings.key_prefix}state:succeeded", 0, -1, withscores=True)
    connection.close()
    first, last = stamps[0][1], stamps[-1][1]
    rate = (count - 1) / ((last - first) / 1e6)
    return [("no-op jobs, one worker, local folder", f"{rate:,.0f}/s", "500/s")], rate


def plain_celery(url: str, folder: Path, count: int, ours: float) -> Row:
    """A plain Celery worker with a task that does nothing, its messages waiting."""
    module = folder / "plain_app.py"
    module.write_text(
        "from celery import Celery\n"
        f"app = Celery('plain', broker={url[:-1] + '9'!r}, backend={url[:-1] + '9'!r})\n"
        "app.conf.task_acks_late = True\n"
        "@app.task(name='plain.nothing')\n"
        "def nothing(number):\n    return number\n"
    )
    sys.path.insert(0, str(folder))
    from plain_app import app, nothing  # type: ignore[import-not-found]

    results = [nothing.delay(number) for number in range(count)]
    command = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "plain_app",
        "worker",
        "-P",
        "threads",
        "-c",
        "64",
        "-l",
        "error",
    ]
    process = subprocess.Popen(
        [*command, "--without-gossip", "--without-mingle"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    backend = redis.Redis.from_url(url[:-1] + "9")
    until(lambda: backend.exists(f"celery-task-meta-{results[0].id}"), 60)
    began = time.perf_counter()
    until(lambda: all(backend.exists(f"celery-task-meta-{result.id}") for result in results[-64:]), 600)
    rate = count / (time.perf_counter() - began)
    process.terminate()
    process.wait(60)
    backend.flushdb()
    backend.close()
    app.close()
    return (
        "plain Celery on kombu's Redis, empty task",
        f"{rate:,.0f}/s: ours does {ours / rate:.2f} of it",
        "",
    )


def idle(url: str, folder: Path, noop: Path, seconds: float = 10.0) -> Row:
    with worker(url, folder, noop) as process:
        process.ready("noop")
        time.sleep(3)  # what a start still does is not idling
        family = process.family()
        before = sum(sum(one.cpu_times()[:2]) for one in family)
        time.sleep(seconds)
        share = (sum(sum(one.cpu_times()[:2]) for one in family) - before) / seconds
        memory = sum(one.memory_info().rss for one in family) / 2**20
    return ("idle worker (supervisor and child)", f"{share:.2%} of a core; {memory:.0f} MB", "1 %")


def event_lag(client: JobClient, url: str, folder: Path, noop: Path, count: int = 200) -> Row:
    """From Redis's stamp on an event to its reader, while jobs run."""
    lags: list[float] = []
    with worker(url, folder, noop) as process:
        process.ready("noop")
        server = redis.Redis.from_url(url)
        seconds, micros = server.time()
        offset = time.time() - (seconds + micros / 1e6)
        server.close()

        def read() -> None:
            with JobClient(url) as reader:
                ended = 0
                for event in reader.events(run="lag", idle_s=30):
                    lags.append(time.time() - offset - event.time.timestamp())
                    ended += event.ended
                    if ended == count:
                        return

        thread = threading.Thread(target=read)
        thread.start()
        for number in range(count):
            client.submit(
                {**job(number), "run": "lag", "priority": "normal", "params": {"sleep_s": 0.01, "steps": 4}}
            )
            time.sleep(0.01)
        thread.join()
    middle, tail = percentile(lags, 0.5) * 1e3, percentile(lags, 0.99) * 1e3
    return (f"event lag, {len(lags)} events", f"median {middle:.1f} ms, p99 {tail:.1f} ms", "p99 250 ms")


def claims(url: str) -> Iterator[tuple[str, str, str, str, str]]:
    client = redis.Redis.from_url(url[:-1] + "8", decode_responses=True)
    for messages, keys in ((1_000, 10), (10_000, 200), (100_000, 10), (100_000, 2_000)):
        client.flushdb()
        store = LaneStore(client, "")
        for number in range(messages - 1_000):
            store.put(message(number, keys))
        began = time.perf_counter()
        for number in range(messages - 1_000, messages):
            store.put(message(number, keys))
        put = (time.perf_counter() - began) / 1_000
        began = time.perf_counter()
        batches = [store.fetch("gen.x", "me", rows=8, seats=8) for _ in range(100)]
        taken = [delivery for batch in batches if batch for delivery in batch.deliveries]
        fetch = (time.perf_counter() - began) / len(taken)
        began = time.perf_counter()
        for delivery in taken:
            store.ack(delivery.tag)
        ack = (time.perf_counter() - began) / len(taken)
        yield (f"{messages:,}", f"{keys:,}", *(f"{cost * 1e6:.0f}" for cost in (put, fetch, ack)))
    client.flushdb()
    client.close()


def message(number: int, keys: int):  # noqa: ANN201 - LaneMessage
    return celery_message(
        "saggar.generate",
        f"m{number}",
        "gen.x",
        priority_class=2,
        batch_key=f"k{number * 7919 % keys}",
        rows=1,
    )


@contextmanager
def worker(url: str, folder: Path, noop: Path) -> Iterator[WorkerProcess]:
    flags = ("--executor", "local", "--spool", str(folder / "spool"), "--log-level", "error")
    process = WorkerProcess(url, str(folder / "store"), str(noop), folder / "worker.log", flags)
    with process.start() as started:
        yield started


if __name__ == "__main__":
    main()
