"""Messages and arrays between two processes of a group: whole, compact, nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saggar.engine import InvalidRequest, OutOfMemory, WorkerDied
from saggar.engine.worker.channel import MAPPED, SMALL, Channel, ChannelClosed
from saggar.engine.worker.segments import KEPT_BYTES

from tests.support.memory import named_segments

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    ends = Channel(one), Channel(other)
    yield ends
    for end in ends:
        end.close()


def exchange(pair: Pair, message: object) -> object:
    sender = threading.Thread(target=pair[0].send, args=(message,))
    sender.start()
    got = pair[1].receive()
    sender.join()
    return got


def open_files() -> set[str]:
    return {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


def memory_files() -> list[str]:
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.append(os.readlink(path))
    return [name for name in found if "memfd:saggar" in name]


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("params.height", "is off", "multiple of 16"), OutOfMemory("no"), WorkerDied("gone")],
)
def test_errors_keep_their_kind_and_text(pair: Pair, error: Exception) -> None:
    got = exchange(pair, error)
    assert type(got) is type(error)
    assert str(got) == str(error)


def test_arrays_come_whole_whatever_their_layout(pair: Pair) -> None:
    base = np.arange(3 * 400 * 500, dtype=np.uint8).reshape(400, 500, 3)
    arrays: dict[str, Any] = {
        "small": np.arange(5),
        "empty": np.zeros((0, 3), np.float32),
        "plain": base,
        "view": base[::2, ::3],
        "transposed": base.T,
        "fortran": np.asfortranarray(base.astype(np.float64)),
        "flat": np.zeros(SMALL, np.uint8),
        "objects": np.array([{"a": 1}] * SMALL),
        "list": [base + 1, "text", base + 2],
    }
    got = exchange(pair, arrays)
    assert isinstance(got, dict)
    for name, value in arrays.items():
        pieces = zip(value, got[name], strict=True) if name == "list" else [(value, got[name])]
        for sent, came in pieces:
            np.testing.assert_array_equal(came, sent)
    got["plain"][0, 0, 0] = 99
    assert base[0, 0, 0] == 0


def test_a_view_does_not_ship_its_base(pair: Pair) -> None:
    base = np.zeros((64, 1024, 1024), np.uint8)
    got = exchange(pair, base[3])
    assert isinstance(got, np.ndarray)
    mapped: object = got.base
    assert isinstance(mapped, bytearray)
    assert len(mapped) == 1024 * 1024


def test_a_segment_has_no_name_and_a_small_one_holds_no_file(pair: Pair) -> None:
    before, files = named_segments(), open_files()
    got = exchange(pair, [np.ones((100, 2000), np.float32), np.zeros((300, 300), np.uint8)])
    assert named_segments() == before
    assert open_files() == files
    assert isinstance(got, list)
    assert (got[0].sum(), got[1].sum()) == (200_000, 0)


def test_a_large_segment_is_used_again_once_its_arrays_are_gone(pair: Pair) -> None:
    names = named_segments()
    first = exchange(pair, np.full(MAPPED, 1, np.uint8))
    files = len(memory_files())
    assert isinstance(first, np.ndarray)
    kept = first[100:200]
    del first
    exchange(pair[::-1], "nothing came back yet")
    second = exchange(pair, np.full(MAPPED, 2, np.uint8))
    assert kept.sum() == 100
    assert isinstance(second, np.ndarray)
    assert second.sum() == 2 * MAPPED
    address = second.ctypes.data
    del second
    gc.collect()
    exchange(pair[::-1], "the second one did")
    third = exchange(pair, np.full(MAPPED, 3, np.uint8))
    assert isinstance(third, np.ndarray)
    assert third.ctypes.data == address
    assert (third.sum(), kept.sum()) == (3 * MAPPED, 100)
    assert len(memory_files()) == files + 2
    assert named_segments() == names


def test_segments_never_change_under_arrays_that_are_held(pair: Pair) -> None:
    draw = random.Random(5)
    held: list[tuple[int, np.ndarray]] = []
    for number in range(60):
        got = exchange(pair, [np.full(MAPPED + draw.randrange(3) * 1000, number % 251, np.uint8), "text"])
        assert isinstance(got, list)
        held.append((number % 251, got[0][:: draw.choice([1, 1000])]))
        del got
        while len(held) > draw.randrange(1, 4):
            held.pop(draw.randrange(len(held)))
        if draw.random() < 0.7:
            exchange(pair[::-1], "an answer, and what came back with it")
        assert all((array == value).all() for value, array in held)
    assert len(memory_files()) <= 40


def test_segments_beyond_what_is_kept_are_given_up_on_both_sides(pair: Pair) -> None:
    many = [exchange(pair, np.full(KEPT_BYTES // 4, number, np.uint8)) for number in range(7)]
    full = len(memory_files())
    assert full == 14
    many.clear()
    gc.collect()
    exchange(pair[::-1], "all came back")
    exchange(pair, "three are forgotten")
    assert len(memory_files()) == 8
    for end in pair:
        end.close()
    assert not memory_files()


def test_a_message_that_is_never_read_leaves_nothing(pair: Pair) -> None:
    pair[0].send(np.ones((200, 200), np.float32))
    pair[1].close()
    pair[0].close()
    assert not [path for path in open_files() if "memfd" in path]


def test_a_closed_end_is_an_error_and_wakes_the_reader(pair: Pair) -> None:
    failed = threading.Event()

    def read() -> None:
        try:
            pair[1].receive()
        except ChannelClosed:
            failed.set()

    reader = threading.Thread(target=read)
    reader.start()
    pair[0].close()
    assert failed.wait(10)
    reader.join()
    with pytest.raises(ChannelClosed):
        pair[1].send("anyone?")


def test_messages_of_many_threads_stay_whole(pair: Pair) -> None:
    def send(number: int) -> None:
        for _ in range(20):
            pair[0].send((number, np.full((100, 200), number, np.uint8)))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(80):
        message = pair[1].receive()
        assert isinstance(message, tuple)
        assert (message[1] == message[0]).all()
    for thread in threads:
        thread.join()
