"""A process that decodes files for a worker, one after the other: what brings a decoder down does not bring the worker
down, and what takes too long is killed.

`python -m saggar.workers.inputs.decoder FD`: orders come as JSON over that socket, each with the file and, where it may
be read, a memory file for its arrays; the answer is JSON. It ends when the socket does, and by its own alarm where
it is kept past its time and nobody is left to kill it. Nothing is pickled.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from saggar.engine.media import Clip, Media, Sound
from saggar.workers.inputs.bad import BadInput
from saggar.workers.inputs.measure import measure
from saggar.workers.inputs.policy import Limits

ORDER_BYTES = 1 << 16
_SPARE = 1 << 30
"""Bytes of address space beyond what was counted for a file: libraries, threads, an index, a codec's own frames."""
_GRACE_S = 10.0
"""So much later than the worker would kill it, it ends by itself."""
_ALIGN = 64
_TRACE = 4000  # characters


def main() -> None:
    """Until the other end is closed."""
    _stand_apart()
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        sock.sendall(b"{}")  # ready
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries tell there what they think of each file
        while True:
            data, fds, _, _ = socket.recv_fds(sock, ORDER_BYTES, 2)
            if not data:
                return
            try:
                answer = _answer(json.loads(data), fds)
            finally:
                for fd in fds:
                    os.close(fd)
            sock.sendall(json.dumps(answer).encode())


def _stand_apart() -> None:
    """What stops a worker's whole group is for the worker to hear: it finishes what it has in hand. Where memory runs
    out, this process goes before the worker does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # a system without it
        Path("/proc/self/oom_score_adj").write_text("1000")


def _answer(order: Mapping[str, object], fds: Sequence[int]) -> dict[str, object]:
    given = order["limits"]
    assert isinstance(given, dict)
    limits = Limits(**given)
    try:
        with _timed(limits.decode_s + _GRACE_S), os.fdopen(os.dup(fds[0]), "rb") as file:
            _bound_memory(_SPARE)
            found = measure(str(order["kind"]), file, bool(order["alpha"]), limits)
            most = order["most"]
            assert isinstance(most, int)
            if found.bytes > most:
                return {"bytes": found.bytes, "kept": found.kept}
            _bound_memory(2 * found.bytes + _SPARE)
            return _write(fds[1], found.read())
    except BadInput as error:
        return {"bad": [error.message, error.allowed]}
    except MemoryError:
        return {"bad": ["takes more memory than its size and length account for", "files that are whole"]}
    except Exception as error:  # noqa: BLE001  (libraries raise whatever a file brings them to: the worker logs it)
        bad = [f"cannot be decoded: {type(error).__name__}", "files that are whole"]
        return {"bad": bad, "trace": traceback.format_exc()[-_TRACE:]}


@contextmanager
def _timed(seconds: float) -> Iterator[None]:
    """The alarm's signal ends the process, also in the middle of a library that does not come back."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _bound_memory(more: int) -> None:
    """From now on, beyond what is in use: a small file may claim an index, a tile or a frame of gigabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + more
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard)
    )


def _write(fd: int, media: Media) -> dict[str, object]:
    """Puts the arrays into the memory file; says where they are."""
    sound = media if isinstance(media, Sound) else media.sound if isinstance(media, Clip) else None
    pixels = None if isinstance(media, Sound) else media.frames if isinstance(media, Clip) else media
    arrays = {
        name: np.asarray(array)
        for name, array in (("pixels", pixels), ("samples", sound.samples if sound else None))
        if array is not None
    }
    offsets, end = {}, 0
    for name, array in arrays.items():
        offsets[name] = end
        end = -(-(end + array.nbytes) // _ALIGN) * _ALIGN
    os.ftruncate(fd, end)
    with mmap.mmap(fd, end) as memory:
        for name, array in arrays.items():
            target = np.ndarray(array.shape, array.dtype, memory, offsets[name])
            target[...] = array
            del target  # the mapping cannot be closed while somebody looks at it
    return {
        "arrays": {name: {"offset": offsets[name], "shape": array.shape} for name, array in arrays.items()},
        "fps": media.fps if isinstance(media, Clip) else None,
        "rate": sound.rate if sound else None,
    }


if __name__ == "__main__":
    main()
