"""Jobs with input files through one worker, beside jobs without: no model, a local folder for everything.

    python -m benchmarks.inputs [--jobs 500]

Starts its own Valkey and workers. All jobs of a case wait before its worker starts; each has a picture of its own, as
an upload in the worker's store.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
from PIL import Image
from saggar.engine.models.registry import open_family
from saggar.jobs.cards import Cards
from saggar.jobs.client import JobClient
from saggar.jobs.settings import connect
from saggar.workers.servers import RedisServer
from saggar.workers.translate import to_card

from benchmarks.report import table
from tests.support.cluster import WorkerProcess, noop_model, until

Row = tuple[str, str, str]
CASES: tuple[tuple[str, int | None, tuple[str, ...]], ...] = (
    ("no input", None, ()),
    ("a PNG of 64×64 each", 64, ()),
    ("a PNG of 512×512 each", 512, ()),
)
"""What it is called, the picture's side, flags of the worker."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=500, help="jobs of each case")
    count = parser.parse_args().jobs
    rows = []
    for what, side, flags in CASES:
        with tempfile.TemporaryDirectory() as name, RedisServer(Path(name) / "redis") as server:
            rows.append((what, *through(server.url, Path(name), count, side, flags)))
    print(
        table(f"Input files, {count} no-op jobs, one worker", ("job", "jobs", "processor time a job"), rows)
    )


def through(url: str, folder: Path, count: int, side: int | None, flags: tuple[str, ...]) -> tuple[str, str]:
    """Jobs a second between the first record and the last; processor time a job, of the worker and its decoders."""
    noop, store = noop_model(folder / "noop"), folder / "store"
    with JobClient(url) as client:
        publish(client, noop)
        for outcome in client.submit_many(jobs(count, side, store)):
            assert not isinstance(outcome, Exception), outcome
        always = ("--executor", "local", "--log-level", "error", *flags)
        with WorkerProcess(url, str(store), str(noop), folder / "worker.log", always).start() as worker:
            worker.ready("noop")
            before = seconds_of(worker.family())
            until(lambda: client.counts()["succeeded"] == count, 600)
            spent = seconds_of(worker.family()) - before
        with closing(connect(client.settings)) as connection:
            key = f"{client.settings.key_prefix}state:succeeded"
            stamps = [stamp for _, stamp in connection.zrange(key, 0, -1, withscores=True)]
    rate = (count - 1) / ((stamps[-1] - stamps[0]) / 1e6)
    return f"{rate:,.0f}/s", f"{spent / count * 1e3:.1f} ms"


def publish(client: JobClient, noop: Path) -> None:
    """The card that the worker will publish, so that jobs are queued before it runs."""
    with closing(connect(client.settings)) as connection:
        cards = Cards(connection, client.settings)
        cards.publish(to_card(open_family(str(noop)).info("noop", 8, ""), "noop", 8), "benchmark")
        cards.leave("noop", "benchmark")


def jobs(count: int, side: int | None, store: Path) -> Iterator[dict[str, object]]:
    """With a picture each, unless `side` is None."""
    uploads = store / "uploads"
    uploads.mkdir(parents=True)
    dice = np.random.default_rng(0)
    for number in range(count):
        job = {"model": "noop", "prompt": f"number {number}", "params": {"steps": 1}, "seed": number}
        if side is None:
            yield job
            continue
        picture = dice.integers(0, 256, (side // 8, side // 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)
        Image.fromarray(picture).save(uploads / f"{number}.png")
        yield {**job, "task": "i2i", "inputs": {"image": [(uploads / f"{number}.png").absolute().as_uri()]}}


def seconds_of(processes: list[psutil.Process]) -> float:
    """Processor time in seconds until now, of those that live."""
    return sum(sum(one.cpu_times()[:2]) for one in processes)


if __name__ == "__main__":
    main()
