"""What it costs to bring a large array from a rank's process to the engine's, against a plain copy of it.

    python -m benchmarks.transport [--megabytes 64]

Goal: at most 1.5 times a copy. The first message makes the shared memory, later ones use it again.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np
from saggar.engine.worker.channel import Channel

from benchmarks.report import table

REPEATS = 15


def main() -> None:
    """Print the table; with --serve be the other process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    array = np.random.default_rng(0).integers(0, 256, options.megabytes * 1_000_000, dtype=np.uint8)
    if options.serve is not None:
        serve(Channel(socket.socket(fileno=options.serve)), array)
        return
    first, later = transport(options.megabytes)
    copies = [timed(array.copy) for _ in range(REPEATS)]
    copy = median(copies[1:])
    ratio = later / copy
    verdict = "met" if ratio <= 1.5 else "missed"
    cells = [f"{value * 1000:.1f}" for value in (copy, first, later)]
    header = ("megabytes", "copy, ms", "first message, ms", "later ones, ms", "ratio", "goal 1.5")
    print(table("Transport of arrays", header, [(options.megabytes, *cells, f"{ratio:.2f}", verdict)]))


def transport(megabytes: int) -> tuple[float, float]:
    """Seconds from asking to having the array: the first time, and the median of later ones."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "benchmarks.transport", "--megabytes", str(megabytes)]
    with theirs:
        child = subprocess.Popen([*command, "--serve", str(theirs.fileno())], pass_fds=[theirs.fileno()])
    channel = Channel(ours)

    def ask() -> None:
        channel.send("the array")
        got = channel.receive()
        assert isinstance(got, np.ndarray)
        assert got.nbytes == megabytes * 1_000_000

    channel.receive()
    times = [timed(ask) for _ in range(REPEATS)]
    channel.send(None)
    child.wait()
    channel.close()
    return times[0], median(times[2:])


def serve(channel: Channel, array: np.ndarray) -> None:
    """Send the array as often as asked."""
    channel.send("ready")
    while channel.receive() is not None:
        channel.send(array)


def timed(action: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
