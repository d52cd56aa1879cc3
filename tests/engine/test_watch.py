"""When a rank counts as lost, on a clock of the test's own; and what a rank tells of itself."""

from __future__ import annotations

import os
import socket

import pytest
from saggar.engine.config import Patience
from saggar.engine.executor.watch import Judge, work_of
from saggar.engine.loop import Failures
from saggar.engine.worker.pulse import Activity, Pulse, Slowest, send_pulses

MINUTE = 60.0


def judge(slowest: Slowest | None = None, serving: bool = True) -> Judge:
    return Judge(Patience(), slowest or Slowest(), now=0.0, serving=serving)


def verdicts(case: Judge, verb: str, seconds: int, shape: str = "8 rows", start: float = 0.0) -> list[float]:
    """The seconds at which a verb that long is found to hang, with a pulse each second."""
    found = []
    for second in range(seconds):
        case.hear(Pulse(verb, shape, float(second)), start + second)
        if case.verdict(start + second) is not None:
            found.append(float(second))
    return found


def test_a_forward_of_ten_minutes_outlives_every_limit() -> None:
    slowest = Slowest()
    assert verdicts(judge(slowest), "denoise", 600) == []  # a shape that was never seen
    slowest.add("denoise 8 rows", 10 * MINUTE)
    assert verdicts(judge(slowest), "denoise", 3 * 3600) == []
    assert verdicts(judge(slowest), "denoise", 4 * 3600)[0] == 200 * MINUTE + 1


def test_a_verb_hangs_after_twenty_times_the_slowest_and_two_minutes_at_least() -> None:
    slowest = Slowest()
    for name, seconds in (("decode 8 rows", 0.5), ("denoise 8 rows", 9.0), ("denoise 8 rows", 1.0)):
        slowest.add(name, seconds)
    assert verdicts(judge(slowest), "decode", 300)[0] == 121
    assert verdicts(judge(slowest), "denoise", 300)[0] == 181
    assert verdicts(judge(slowest), "denoise", 300, shape="1 rows") == []
    assert verdicts(judge(slowest), "denoise", 1900, shape="1 rows")[0] == 1801
    text = judge(slowest)
    text.hear(Pulse("decode", "8 rows", 121.0), 5.0)
    assert text.verdict(5.0) == "decode hangs: 121 s, 120 s at most (8 rows)"


def test_loading_and_warming_up_have_no_limit_and_idling_has_none() -> None:
    assert verdicts(judge(serving=False), "denoise", 10_000) == []
    assert verdicts(judge(), "", 10_000) == []


def test_a_rank_without_a_sign_is_lost_and_one_that_works_is_not() -> None:
    for serving in (True, False):
        case = judge(serving=serving)
        case.hear(Pulse(), 1.0)
        case.see(5, 1.0)
        case.see(5, 11.0)
        assert case.verdict(11.0) is None
        assert case.verdict(12.0) == "no sign of life for 11 s"
        case.see(6, 12.0)  # a library holds up its threads, working
        assert case.verdict(22.0) is None
        assert case.verdict(23.0) is not None


def test_a_pulse_counts_on_by_itself() -> None:
    case = judge()
    case.hear(Pulse("decode", "s", 1795.0), 0.0)
    case.see(1, 8.0)
    assert case.verdict(4.0) is None
    assert case.verdict(6.0) is not None


def test_an_activity_tells_what_it_does_and_the_slowest_so_far() -> None:
    now = [0.0]
    activity = Activity(lambda: now[0])
    assert activity.pulse() == Pulse()
    with activity.doing("decode", "s"):
        now[0] = 7.0
        assert Pulse.unpack(activity.pulse().pack()) == Pulse("decode", "s", 7.0)
    assert activity.pulse() == Pulse(slowest={"decode s": 7.0})
    with activity.doing("decode", "s"):
        now[0] = 8.0
    with pytest.raises(ValueError), activity.doing("decode", "s"):  # its time says nothing
        now[0] = 1000.0
        raise ValueError
    assert activity.pulse() == Pulse()


def test_slowest_durations_are_bounded() -> None:
    slowest = Slowest()
    for number in range(3000):
        slowest.add("kept", 3.0)
        slowest.add(f"kind {number}", 1.0)
    assert slowest.of("kept") == 3.0
    assert slowest.of("kind 0") is None
    assert slowest.of("kind 2999") == 1.0


def test_a_reader_that_falls_behind_holds_nobody_up() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    send_pulses(theirs, Activity(), 1e-4)
    ours.settimeout(10)
    for _ in range(2000):
        assert Pulse.unpack(ours.recv(1 << 16)) == Pulse()
    ours.close()


def test_work_is_seen_from_outside() -> None:
    before = work_of(os.getpid())
    while work_of(os.getpid()) == before:
        sum(range(10_000))
    assert work_of(2**22 + 1) == 0


def test_three_failures_within_ten_minutes_are_enough() -> None:
    failures = Failures(Patience())
    assert (failures.add(0.0), failures.add(300.0)) == (0.5, 1.0)
    assert failures.add(601.0) == 1.0  # the first is long ago
    assert failures.add(899.0) is None


def test_what_succeeds_between_failures_forgives_them() -> None:
    failures = Failures(Patience())
    for now in range(5):
        assert failures.add(float(now)) == 0.5
        assert failures.add(now + 0.5) == 1.0
        failures.forgive()
