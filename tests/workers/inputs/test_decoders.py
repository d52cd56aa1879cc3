"""Decoders that crash, hang or are not wanted any more cost one file, and the next one is decoded."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil
import pytest
from saggar.workers.inputs.bad import BadInput
from saggar.workers.inputs.decoder import _GRACE_S, _SPARE
from saggar.workers.inputs.decoders import Decoder, DecoderEnded, DecoderFailed, Decoders, Stopped
from saggar.workers.inputs.measure import Memory
from saggar.workers.inputs.pictures import PEAK_BYTES
from saggar.workers.inputs.policy import Limits

from tests.support.inputs import RED, claims_frames, image, sound, tone, video
from tests.support.wait import until

LIMITS = Limits()
NEVER = threading.Event()


@pytest.fixture
def decoders() -> Iterator[Decoders]:
    decoders = Decoders(most=1)
    yield decoders
    decoders.close()


@pytest.fixture
def picture(tmp_path: Path) -> Iterator[IO[bytes]]:
    (tmp_path / "a.png").write_bytes(image())
    with (tmp_path / "a.png").open("rb") as file:
        yield file


def is_red(array: object) -> bool:
    return isinstance(array, np.ndarray) and bool((array == RED).all())


def idle(decoders: Decoders) -> Decoder:
    return decoders._free[0]


def test_one_process_does_one_file_after_the_other(decoders: Decoders, picture: IO[bytes]) -> None:
    assert decoders.measure("image", picture, False, LIMITS, NEVER) == Memory(12 * 8 * PEAK_BYTES, 12 * 8 * 3)
    first = idle(decoders)
    for _ in range(3):
        found = decoders.read("image", picture, False, LIMITS, NEVER)
        assert is_red(found)
    assert isinstance(found, np.ndarray)
    found[0] = 0  # it is the reader's own
    assert idle(decoders) is first


def test_one_that_was_killed_while_idle_costs_nothing(decoders: Decoders, picture: IO[bytes]) -> None:
    decoders.measure("image", picture, False, LIMITS, NEVER)
    dead = idle(decoders)
    dead._process.kill()
    dead._process.wait()
    assert is_red(decoders.read("image", picture, False, LIMITS, NEVER))
    assert idle(decoders) is not dead
    assert decoders._living == 1


def test_a_file_whose_decoder_ended_is_given_to_another_once(
    decoders: Decoders, picture: IO[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may have killed the first one, for want of memory, with a good file in its hands."""
    ask, asked = Decoder.ask, []

    def killed(self: Decoder, *args: Any) -> dict[str, object]:
        asked.append(self)
        if len(asked) <= times:
            self._process.kill()
            self._process.wait()
        return ask(self, *args)

    monkeypatch.setattr(Decoder, "ask", killed)
    times = 1
    assert is_red(decoders.read("image", picture, False, LIMITS, NEVER))
    asked.clear()
    times = 2
    with pytest.raises(BadInput, match="has ended the decoder, twice"):
        decoders.read("image", picture, False, LIMITS, NEVER)
    assert len(asked) == 2
    assert is_red(decoders.read("image", picture, False, LIMITS, NEVER))


def test_what_stops_the_workers_group_does_not_stop_them(decoders: Decoders, picture: IO[bytes]) -> None:
    """Ctrl-C in a terminal, and systemd, tell all processes; the worker still finishes its jobs."""
    decoders.measure("image", picture, False, LIMITS, NEVER)
    told = idle(decoders)
    for number in (signal.SIGINT, signal.SIGTERM):
        told._process.send_signal(number)
    assert is_red(decoders.read("image", picture, False, LIMITS, NEVER))
    assert idle(decoders) is told


def test_they_go_before_the_worker_where_memory_runs_out(decoders: Decoders, picture: IO[bytes]) -> None:
    decoders.measure("image", picture, False, LIMITS, NEVER)
    assert Path(f"/proc/{idle(decoders)._process.pid}/oom_score_adj").read_text() == "1000\n"


def test_one_that_nobody_kills_ends_by_itself(tmp_path: Path) -> None:
    """As after a worker's SIGKILL, in the middle of a library that does not come back."""
    decoder = Decoder()
    decoder.begin(NEVER)
    (tmp_path / "large.png").write_bytes(image(size=(6000, 6000)))
    at_once = asdict(replace(LIMITS, decode_s=0.001 - _GRACE_S))
    with (tmp_path / "large.png").open("rb") as file, pytest.raises(DecoderEnded):
        memory = os.memfd_create("test")
        order = {"kind": "image", "alpha": False, "limits": at_once, "most": sys.maxsize}
        decoder.ask(order, [file.fileno(), memory], 60.0, NEVER)
    os.close(memory)
    assert decoder._process.wait() == -signal.SIGALRM
    decoder.end()


def test_one_that_hangs_is_killed(decoders: Decoders, picture: IO[bytes]) -> None:
    decoders.measure("image", picture, False, LIMITS, NEVER)
    hung = idle(decoders)._process
    hung.send_signal(signal.SIGSTOP)
    with pytest.raises(BadInput, match="takes too long to decode"):
        decoders.read("image", picture, False, replace(LIMITS, decode_s=0.2), NEVER)
    assert hung.returncode == -signal.SIGKILL
    assert is_red(decoders.read("image", picture, False, LIMITS, NEVER))


def test_small_files_of_many_threads_need_one_process(tmp_path: Path) -> None:
    decoders = Decoders(patience_s=3600.0)
    (tmp_path / "a.png").write_bytes(image())
    seen: list[bool] = []

    def read() -> None:
        with (tmp_path / "a.png").open("rb") as file:
            seen.extend(is_red(decoders.read("image", file, False, LIMITS, NEVER)) for _ in range(5))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [True] * 40
    assert len(decoders._free) == decoders._living == 1
    decoders.close()
    assert decoders._living == 0


def test_where_none_comes_free_others_are_started_up_to_a_bound(picture: IO[bytes]) -> None:
    decoders, over = Decoders(most=3, patience_s=0.05), threading.Event()
    ended: list[str] = []

    def hang() -> None:
        with pytest.raises(Stopped), decoders._one(over) as decoder:
            decoder._process.send_signal(signal.SIGSTOP)
            decoder.ask({}, [], 3600.0, over)
        ended.append("hung")

    threads = [threading.Thread(target=hang) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: decoders._living == 2)
    assert is_red(decoders.read("image", picture, False, LIMITS, NEVER))
    third = idle(decoders)
    with decoders._one(NEVER) as decoder:
        assert decoder is third
        stopped = threading.Event()
        waiting = threading.Thread(target=lambda: ended.append(refused(decoders, stopped)))
        waiting.start()
        stopped.set()
        waiting.join(60)
        assert ended == ["stopped"]
    over.set()
    for thread in threads:
        thread.join(60)
    assert (decoders._living, len(decoders._free)) == (1, 1)
    decoders.close()


def refused(decoders: Decoders, over: threading.Event) -> str:
    with pytest.raises(Stopped), decoders._one(over):
        pass
    return "stopped"


def test_one_that_does_not_start_costs_no_place(picture: IO[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    decoders = Decoders(most=1)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        for _ in range(2):
            with pytest.raises(DecoderFailed, match="a decoder could not be started"):
                decoders.read("image", picture, False, LIMITS, NEVER)
        patch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(FileNotFoundError):
            decoders.read("image", picture, False, LIMITS, NEVER)
    assert is_red(decoders.read("image", picture, False, LIMITS, NEVER))
    decoders.close()


def test_what_is_not_wanted_any_more_ends(decoders: Decoders, picture: IO[bytes]) -> None:
    decoders.measure("image", picture, False, LIMITS, NEVER)
    idle(decoders)._process.send_signal(signal.SIGSTOP)
    over = threading.Event()
    over.set()
    with pytest.raises(Stopped):
        decoders.read("image", picture, False, LIMITS, over)
    assert is_red(decoders.read("image", picture, False, LIMITS, NEVER))


def test_memory_has_a_bound(decoders: Decoders, tmp_path: Path) -> None:
    """Whatever a file brings a decoder to ask for: here four kilobytes, two gigabytes of FFmpeg's index."""
    (tmp_path / "a.mp4").write_bytes(claims_frames(80_000_000))
    with (tmp_path / "a.mp4").open("rb") as file:
        with pytest.raises(BadInput):
            decoders.read("video", file, False, LIMITS, NEVER)
        status = Path(f"/proc/{idle(decoders)._process.pid}/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None
    assert int(peak[1]) << 10 < _SPARE


def test_they_are_told_no_secret(
    decoders: Decoders, picture: IO[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "SAGGAR_REDIS_URL", "SAGGAR_WORKER_SETTINGS", "HF_TOKEN"):
        monkeypatch.setenv(name, "a-secret")
    decoders.measure("image", picture, False, LIMITS, NEVER)
    assert "a-secret" not in psutil.Process(idle(decoders)._process.pid).environ().values()


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_bytes_turned_over_bring_no_decoder_down(
    kind: str, decoders: Decoders, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of 150 spoilt files is read or refused by the same process, and nothing is met that was not foreseen."""
    sources = {
        "image": [image(form=form, size=(40, 30)) for form in ("PNG", "JPEG", "WEBP", "TIFF", "AVIF", "BMP")],
        "video": [
            video(6, sound=tone()),
            video(6, form="webm", codec="libvpx-vp9"),
            video(6, faststart=False),
        ],
        "audio": [sound(form=form) for form in ("WAV", "FLAC", "OGG", "MP3")],
    }[kind]
    limits = replace(LIMITS, frames=100, pixels=1 << 20, memory=1 << 30)
    dice = random.Random(kind)
    seen = set()
    for number in range(150):
        data = bytearray(sources[number % len(sources)])
        for _ in range(dice.choice((1, 3, 20))):
            data[dice.randrange(len(data))] = dice.randrange(256)
        (tmp_path / "spoilt").write_bytes(data)
        with (tmp_path / "spoilt").open("rb") as file:
            try:
                if decoders.measure(kind, file, False, limits, NEVER).peak < limits.memory:
                    decoders.read(kind, file, False, limits, NEVER)
            except BadInput as error:
                assert "ended the decoder" not in error.message
        seen.add(idle(decoders)._process.pid)
    assert len(seen) == 1
    assert caplog.text == ""


def test_they_end_with_their_worker(decoders: Decoders, picture: IO[bytes]) -> None:
    decoders.measure("image", picture, False, LIMITS, NEVER)
    process = idle(decoders)._process
    idle(decoders)._socket.close()  # as the kernel does for a worker that was killed
    until(lambda: process.poll() is not None, what="the decoder's end")
    assert process.returncode == 0
