"""A process that decodes files for a worker, one after the other: what brings a decoder down does not bring the worker
down, and what takes too long is killed.

`python -m saggar.workers.inputs.decoder FD`: orders come as JSON over that socket, each with the file and, where it may
be read, a memory file for its arrays; the answer is JSON. It ends when the socket does. Nothing is pickled.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence

import numpy as np
from saggar.engine.media import Clip, Media, Sound
from saggar.workers.inputs.bad import BadInput
from saggar.workers.inputs.measure import measure
from saggar.workers.inputs.policy import Limits

ORDER_BYTES = 1 << 16
_OVERHEAD = 6 << 30  # of address space, for libraries and their threads
_ALIGN = 64
_TRACE = 4000  # characters


def main() -> None:
    """Until the other end is closed."""
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


def _answer(order: Mapping[str, object], fds: Sequence[int]) -> dict[str, object]:
    given = order["limits"]
    assert isinstance(given, dict)
    limits = Limits(**given)
    _bound_memory(2 * limits.memory + _OVERHEAD)
    try:
        with os.fdopen(os.dup(fds[0]), "rb") as file:
            found = measure(str(order["kind"]), file, bool(order["alpha"]), limits)
            most = order["most"]
            assert isinstance(most, int)
            return _write(fds[1], found.read()) if found.bytes <= most else {"bytes": found.bytes}
    except BadInput as error:
        return {"bad": [error.message, error.allowed]}
    except MemoryError:
        return {"bad": ["takes more memory than there is for it", f"{limits.memory} bytes when decoded"]}
    except Exception as error:  # noqa: BLE001  (libraries raise whatever a file brings them to: the worker logs it)
        bad = [f"cannot be decoded: {type(error).__name__}", "files that are whole"]
        return {"bad": bad, "trace": traceback.format_exc()[-_TRACE:]}


def _bound_memory(size: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


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
