"""The worker's side of its decoders: processes that are started when they are needed, and again when one was lost."""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import IO

import numpy as np
from saggar.engine.media import Clip, Media, Sound
from saggar.workers.inputs.bad import BadInput
from saggar.workers.inputs.decoder import ORDER_BYTES
from saggar.workers.inputs.measure import Memory
from saggar.workers.inputs.policy import Limits

log = logging.getLogger(__name__)
MOST = 4
PATIENCE_S = 0.05
"""So long one that is free is waited for before another is started: small files need one process, not four."""
_LOOK_S = 0.1
_START_S = 300.0
_ALLOWED = "files that can be decoded"
_KEPT = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "HOME",
    "TMPDIR",
    "LANG",
    "LC_ALL",
)


class Stopped(Exception):
    """Nobody wants it any more."""


class DecoderFailed(Exception):
    """No file's fault."""


class DecoderEnded(Exception):
    """It ended in the middle of a file, whose fault that may be."""


class Decoder:
    """One process. An order at a time; after an error it must be ended."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "saggar.workers.inputs.decoder", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environ(),
            )
        self._socket = ours

    @property
    def lives(self) -> bool:
        """It has not ended meanwhile."""
        return self._process.poll() is None

    def begin(self, over: threading.Event) -> None:
        """Waits until it can be asked, so that what is asked has its time for itself. Raises Stopped, DecoderFailed."""
        try:
            self._receive(_START_S, over)
        except (BadInput, DecoderEnded) as error:
            raise DecoderFailed("a decoder could not be started; standard error says why") from error

    def ask(
        self, order: Mapping[str, object], fds: list[int], timeout_s: float, over: threading.Event
    ) -> dict[str, object]:
        """The answer. Raises DecoderEnded when the process has, BadInput when the file took too long, and Stopped."""
        try:
            socket.send_fds(self._socket, [json.dumps(order).encode()], fds)
        except OSError as error:
            raise DecoderEnded from error
        return self._receive(timeout_s, over)

    def _receive(self, timeout_s: float, over: threading.Event) -> dict[str, object]:
        deadline = time.monotonic() + timeout_s
        while not select.select([self._socket], [], [], _LOOK_S)[0]:
            if over.is_set():
                raise Stopped
            if time.monotonic() > deadline:
                raise BadInput("takes too long to decode", f"files that are decoded within {timeout_s:g} s")
        try:
            data = self._socket.recv(ORDER_BYTES)
        except OSError as error:
            raise DecoderEnded from error
        if not data:
            raise DecoderEnded
        answer: dict[str, object] = json.loads(data)
        return answer

    def end(self) -> None:
        """At once."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


class Decoders:
    """At most so many processes, which threads share. Close it."""

    def __init__(self, most: int = MOST, patience_s: float = PATIENCE_S) -> None:
        self._most = most
        self._patience_s = patience_s
        self._free: list[Decoder] = []
        self._living = 0
        self._starting = False
        self._grown_at = 0.0
        self._changed = threading.Condition()

    def measure(
        self, kind: str, file: IO[bytes], alpha: bool, limits: Limits, over: threading.Event
    ) -> Memory:
        """What decoding the file takes. Raises BadInput and Stopped."""
        answer = self._ask(_order(kind, alpha, limits, -1), [file.fileno()], limits, over)
        peak, kept = answer["bytes"], answer["kept"]
        assert isinstance(peak, int) and isinstance(kept, int)
        return Memory(peak, kept)

    def read(
        self,
        kind: str,
        file: IO[bytes],
        alpha: bool,
        limits: Limits,
        over: threading.Event,
        most: int | None = None,
    ) -> Media | None:
        """The file decoded; its arrays lie in memory that the decoder has filled. None: decoding takes more than `most`
        bytes. Raises BadInput and Stopped.
        """
        memory = os.memfd_create("saggar-input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            order = _order(kind, alpha, limits, sys.maxsize if most is None else most)
            answer = self._ask(order, [file.fileno(), memory], limits, over)
            if "bytes" in answer:
                return None
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # or reading it could be a crash
            return _media(kind, answer, mmap.mmap(memory, 0, access=mmap.ACCESS_COPY))
        finally:
            os.close(memory)

    def close(self) -> None:
        """Ends those that are idle; the others end with what they do."""
        with self._changed:
            for decoder in self._free:
                decoder.end()
            self._living -= len(self._free)
            self._free.clear()

    def _ask(
        self, order: Mapping[str, object], fds: list[int], limits: Limits, over: threading.Event
    ) -> dict[str, object]:
        """A second time, by another process, where the first has ended: the system kills some when memory is short."""
        try:
            answer = self._ask_one(order, fds, limits, over)
        except DecoderEnded:
            log.warning("a decoder ended while it had a file; another one is asked")
            try:
                answer = self._ask_one(order, fds, limits, over)
            except DecoderEnded as error:
                raise BadInput("has ended the decoder, twice", _ALLOWED) from error
        if trace := answer.get("trace"):
            log.warning("an input file met an error that was not foreseen:\n%s", trace)
        if isinstance(bad := answer.get("bad"), list):
            raise BadInput(str(bad[0]), str(bad[1]))
        return answer

    def _ask_one(
        self, order: Mapping[str, object], fds: list[int], limits: Limits, over: threading.Event
    ) -> dict[str, object]:
        with self._one(over) as decoder:
            return decoder.ask(order, fds, limits.decode_s, over)

    @contextmanager
    def _one(self, over: threading.Event) -> Iterator[Decoder]:
        decoder = self._free_one(over) or self._new(over)
        try:
            yield decoder
        except BaseException:
            decoder.end()
            self._lost()
            raise
        with self._changed:
            self._free.append(decoder)
            self._changed.notify()

    def _free_one(self, over: threading.Event) -> Decoder | None:
        """None: start another one."""
        since = time.monotonic()
        with self._changed:
            while True:
                self._bury()
                if self._free:
                    return self._free.pop()
                if over.is_set():
                    raise Stopped
                waited = time.monotonic() - max(since, self._grown_at)
                wanted = not self._living or (self._living < self._most and waited >= self._patience_s)
                if wanted and not self._starting:
                    self._living += 1
                    self._starting = True
                    return None
                self._changed.wait(min(_LOOK_S, self._patience_s))

    def _bury(self) -> None:
        """Those of the idle that have ended are forgotten: the next file shall not pay for it."""
        for decoder in [one for one in self._free if not one.lives]:
            decoder.end()
            self._free.remove(decoder)
            self._living -= 1

    def _new(self, over: threading.Event) -> Decoder:
        """Once it can be asked. One at a time, for several that start slow one another down."""
        try:
            decoder = Decoder()
            try:
                decoder.begin(over)
            except BaseException:
                decoder.end()
                raise
            return decoder
        except BaseException:
            self._lost()
            raise
        finally:
            with self._changed:
                self._starting = False
                self._grown_at = time.monotonic()
                self._changed.notify_all()

    def _lost(self) -> None:
        with self._changed:
            self._living -= 1
            self._changed.notify()


def _environ() -> dict[str, str]:
    """What a decoder needs and no secret; without threads for arithmetic that it does not do."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {**kept, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}


def _order(kind: str, alpha: bool, limits: Limits, most: int) -> dict[str, object]:
    return {"kind": kind, "alpha": alpha, "limits": asdict(limits), "most": most}


def _media(kind: str, answer: Mapping[str, object], memory: mmap.mmap) -> Media:
    """What the decoder says is checked by numpy against the memory's size."""
    places = answer["arrays"]
    assert isinstance(places, dict)

    def array(name: str, dtype: type) -> np.ndarray:
        place = places[name]
        return np.ndarray(tuple(map(int, place["shape"])), dtype, memory, int(place["offset"]))

    sound = None
    if "samples" in places:
        sound = Sound(array("samples", np.float32), int(str(answer["rate"])))
    if kind == "audio":
        assert sound is not None
        return sound
    pixels = array("pixels", np.uint8)
    return Clip(pixels, float(str(answer["fps"])), sound) if kind == "video" else pixels
