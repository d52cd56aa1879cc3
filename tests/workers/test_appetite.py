"""The lane is asked for whole batches or for what tops one up, never for pieces."""

from __future__ import annotations

from dataclasses import dataclass, field

from saggar.engine.request import Room
from saggar.jobs.lanes import Want
from saggar.workers.appetite import EngineAppetite


@dataclass
class FakeReservation:
    rows: int
    released: int = 0

    def release(self) -> None:
        self.released += 1


@dataclass
class FakeEngine:
    now: Room
    reserved: list[FakeReservation] = field(default_factory=list)

    def room(self) -> Room:
        return self.now

    def reserve(self, key: str, rows: int) -> FakeReservation:
        self.reserved.append(FakeReservation(rows))
        return self.reserved[-1]


def want(room: Room, free: int = 64) -> Want:
    return EngineAppetite(FakeEngine(room), 8).want("gen.x", free)  # type: ignore[arg-type]


def test_an_engine_without_a_next_batch_takes_a_whole_one() -> None:
    assert want(Room(8, None, 0)).rows == 8


def test_an_open_batch_is_topped_up_and_none_is_begun_beside_it() -> None:
    assert want(Room(3, "k", 3)) == Want(rows=0, open_key="k", room=3, urgent=2)


def test_no_batch_is_begun_in_what_is_left_of_another() -> None:
    assert want(Room(3, None, 0)).rows == 0


def test_no_batch_is_begun_when_threads_would_cut_it() -> None:
    assert want(Room(8, None, 0), free=9).rows == 0
    assert want(Room(8, None, 0), free=10).rows == 8


def test_nothing_is_fetched_once_closed_or_while_outputs_have_no_place() -> None:
    engine = FakeEngine(Room(8, None, 0))
    full = EngineAppetite(engine, 8, has_room=lambda: False)  # type: ignore[arg-type]
    assert full.want("gen.x", 64) == Want(rows=0)
    closed = EngineAppetite(engine, 8)  # type: ignore[arg-type]
    closed.close()
    assert closed.want("gen.x", 64) == Want(rows=0)


def test_two_interactive_messages_are_taken_beyond_the_seats_until_they_are_gone() -> None:
    appetite = EngineAppetite(FakeEngine(Room(0, None, 0)), 8)  # type: ignore[arg-type]
    assert appetite.want("gen.x", 64).urgent == 2
    appetite.fetched("gen.x", "k", 0, {"a": 1, "b": 1})
    assert appetite.want("gen.x", 64).urgent == 0
    appetite.gone("a")
    assert appetite.want("gen.x", 64).urgent == 1
    appetite.fetched("gen.x", "k", 2, {"c": 1})
    assert appetite.want("gen.x", 64).urgent == 1


def test_every_row_fetched_is_reserved_and_released_once() -> None:
    engine = FakeEngine(Room(8, None, 0))
    appetite = EngineAppetite(engine, 8)  # type: ignore[arg-type]
    appetite.fetched("gen.x", "k", 2, {"a": 4, "b": 1, "c": 2})
    assert [one.rows for one in engine.reserved] == [4, 1, 2]
    assert appetite.take("a") is engine.reserved[0]
    for tag in "abc":
        appetite.gone(tag)
        appetite.gone(tag)
    assert [one.released for one in engine.reserved] == [0, 1, 1]
