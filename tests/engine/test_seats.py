"""Seats of the engine for whoever fetches work: what is announced, held, given up, told."""

from __future__ import annotations

import threading

from tests.engine.conftest import MakeEngine
from tests.engine.support import at_step, eventually, noop


def test_seats_follow_reservations_and_batches(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch=4, reservation_hold_s=30)
    key = engine.batch_key(noop("x", key="k"))
    assert (engine.room().seats, engine.room().open_key) == (4, None)
    first = engine.reserve(key, 3)
    assert (engine.room().seats, engine.room().open_key, engine.room().room) == (1, key, 1)
    handles = [engine.submit(noop(f"r{i}", key="k"), reservation=first) for i in range(2)]
    assert (first.rows, engine.room().seats) == (1, 1)
    last = engine.submit(noop("r2", key="k", num_outputs=1), reservation=first)
    outputs = [handle.result(10) for handle in [*handles, last]]
    assert {output.batch_size for output in outputs} == {3}
    first.release()
    assert engine.room().seats == 4


def test_a_batch_is_held_for_announced_rows_but_not_for_ever(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch=4, reservation_hold_s=0.1)
    reservation = engine.reserve(engine.batch_key(noop("x")), 2)
    output = engine.submit(noop("a"), reservation=reservation).result(10)
    assert output.batch_size == 1
    assert engine.stats()["cut.late"] == 1
    grown = threading.Event()
    engine.on_room(grown.set)
    reservation.release()
    reservation.release()
    assert grown.wait(10)
    assert engine.room().seats == 4


def test_an_early_release_lets_the_batch_go_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch=4, reservation_hold_s=3600)
    reservation = engine.reserve(engine.batch_key(noop("x")), 2)
    handle = engine.submit(noop("a"), reservation=reservation)
    reservation.release()
    assert handle.result(10).batch_size == 1


def test_whoever_fetches_is_told_when_a_batch_begins_and_room_grows(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch=2)
    told: list[int] = []
    at_work, go_on = threading.Event(), threading.Event()

    def stay() -> None:
        at_work.set()
        go_on.wait(10)

    first = at_step("r0", 1, stay)
    engine.pause()
    handles = [engine.submit(noop(f"r{i}"), on_event=first) for i in range(2)]
    assert engine.room().seats == 0
    engine.on_room(lambda: told.append(engine.room().seats))
    engine.resume()
    assert at_work.wait(10)
    assert told == [2]
    later = engine.submit(noop("r2"))
    assert engine.room().seats == 1
    go_on.set()
    for handle in [*handles, later]:
        handle.result(10)
    eventually(lambda: told[-1] == 2)
