"""Inputs in hand: within the memory that is given to them, and not in the seats of others for long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from saggar.engine.errors import Cancelled, EngineClosed
from saggar.engine.handle import Handle, Reservation, Stream
from saggar.engine.media import Media
from saggar.engine.request import Output
from saggar.engine.sched.base import Announced
from saggar.jobs.errors import ConfigError, InvalidJob
from saggar.jobs.schema import Job
from saggar.workers.attempts import Attempt
from saggar.workers.inputs.budget import Budget
from saggar.workers.inputs.decoders import Decoders, Stopped
from saggar.workers.inputs.fetch import Fetcher, Ticket
from saggar.workers.inputs.hold import Files
from saggar.workers.inputs.load import SMALL_BYTES, InputLoader
from saggar.workers.inputs.measure import Memory
from saggar.workers.inputs.pictures import PEAK_BYTES
from saggar.workers.inputs.policy import Limits, Policy
from saggar.workers.settings import WorkerSettings

from tests.support.inputs import RED, image, input_loader
from tests.support.wait import until


def job(*uris: str) -> Job:
    fields = {"model": "noop", "prompt": "p", "task": "i2i", "inputs": {"image": list(uris)}}
    return Job.model_validate(fields)


def test_many_jobs_at_once_stay_within_the_memory(tmp_path: Path) -> None:
    (tmp_path / "uploads").mkdir()
    (tmp_path / "uploads" / "a.png").write_bytes(image(size=(100, 100)))
    uri = (tmp_path / "uploads" / "a.png").as_uri()
    peak = 100 * 100 * PEAK_BYTES
    loader = input_loader(tmp_path.as_uri(), memory=2 * peak)
    seen: list[int] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(3):
                with loader.held(job(uri, uri), Ticket()) as inputs:
                    seen.append(loader._budget.used)
                    assert [picture.shape for picture in inputs["image"]] == [(100, 100, 3)] * 2  # type: ignore[union-attr]
        except BaseException as error:  # noqa: BLE001  (told below)
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failed == []
    assert len(seen) == 24
    assert max(seen) <= 2 * peak
    assert loader._budget.used == 0


def test_room_is_given_in_the_order_of_asking() -> None:
    budget = Budget(10)
    got: list[str] = []
    let_go = threading.Event()

    def take(name: str, size: int) -> None:
        with budget.hold(size, threading.Event()):
            got.append(name)
            let_go.wait(60)

    with budget.hold(8, threading.Event()):
        threads = []
        for number, (name, size) in enumerate((("large", 9), ("small", 1))):
            threads.append(threading.Thread(target=take, args=(name, size)))
            threads[-1].start()
            until(lambda number=number: len(budget._queue) == number + 1)  # type: ignore[misc]
        assert got == [], "the small one would fit, and does not pass by"
    until(lambda: len(got) == 2)
    assert got == ["large", "small"]
    let_go.set()
    for thread in threads:
        thread.join(60)
    assert budget.used == 0


class Counted(Decoders):
    """`asked`: what its processes were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def measure(self, *arguments: Any) -> Memory:
        self.asked.append("measure")
        return super().measure(*arguments)

    def read(self, *arguments: Any) -> Media | None:
        self.asked.append("read")
        return super().read(*arguments)


@pytest.fixture
def counted() -> Iterator[Counted]:
    decoders = Counted()
    yield decoders
    decoders.close()


def files(folder: Path, *sizes: tuple[int, int]) -> list[str]:
    (folder / "uploads").mkdir()
    for number, size in enumerate(sizes):
        (folder / "uploads" / f"{number}.png").write_bytes(image(size=size))
    return [(folder / "uploads" / f"{number}.png").as_uri() for number in range(len(sizes))]


LARGE = (1500, 1300)
assert LARGE[0] * LARGE[1] * PEAK_BYTES > SMALL_BYTES


@pytest.mark.parametrize(
    ("sizes", "asked"),
    [
        ([(100, 100), (50, 50)], ["read"] * 2),
        ([LARGE], ["read", "measure", "read"]),
        ([(100, 100), LARGE], ["read"] * 2 + ["measure"] * 2 + ["read"] * 2),
    ],
)
def test_small_files_are_asked_for_once(
    sizes: list[tuple[int, int]], asked: list[str], counted: Counted, tmp_path: Path
) -> None:
    uris = files(tmp_path, *sizes)
    loader = InputLoader(input_loader(tmp_path.as_uri())._fetcher, decoders=counted)
    with loader.held(job(*uris), Ticket()) as inputs:
        assert [picture.shape for picture in inputs["image"]] == [(y, x, 3) for x, y in sizes]  # type: ignore[union-attr]
        assert all((picture == RED).all() for picture in inputs["image"])
        assert loader._budget.used == sum(x * y * 3 for x, y in sizes)
    assert loader._budget.used == 0
    assert counted.asked == asked


def test_files_are_decoded_one_after_the_other_and_room_for_that_is_enough(tmp_path: Path) -> None:
    """Eight pictures: one at its peak, the others as they stay."""
    uris = files(tmp_path, *[(300, 200)] * 8)
    pixels = 300 * 200
    needed = 8 * pixels * 3 + pixels * (PEAK_BYTES - 3)
    with input_loader(tmp_path.as_uri(), memory=needed).held(job(*uris), Ticket()) as inputs:
        assert len(inputs["image"]) == 8
    with (
        pytest.raises(
            InvalidJob, match=f"inputs: take {needed} bytes while they are decoded one after the other"
        ),
        input_loader(tmp_path.as_uri(), memory=needed - 1).held(job(*uris), Ticket()),
    ):
        pass


def test_where_there_is_no_room_at_once_it_is_asked_how_large_they_are(
    counted: Counted, tmp_path: Path
) -> None:
    uris = files(tmp_path, (100, 100), (50, 50))
    limits = Limits(memory=2 * SMALL_BYTES)
    loader = InputLoader(Fetcher(Policy.make(tmp_path.as_uri()), limits), decoders=counted)
    with loader._budget.hold(1, threading.Event()), loader.held(job(*uris), Ticket()):
        assert counted.asked == ["measure", "measure", "read", "read"]


def test_nobody_who_waits_for_room_is_passed_by() -> None:
    budget, over = Budget(10), threading.Event()
    with budget.hold(8, over):
        with budget.hold_now(3) as hold:
            assert hold is None
        with budget.hold_now(2) as hold:
            assert hold is not None
            assert budget.used == 10
        waiting = threading.Thread(target=lambda: budget.hold(9, over).__enter__())
        waiting.start()
        until(lambda: len(budget._queue) == 1)
        with budget.hold_now(1) as hold:
            assert hold is None
        over.set()
        waiting.join(60)
        assert budget.used == 8
    with budget.hold_now(11) as hold:
        assert hold is None, "alone, it would still be more than the limit"
    assert budget.used == 0


def test_a_bad_file_gives_its_room_back(tmp_path: Path) -> None:
    uris = files(tmp_path, (100, 100), (50, 50))
    (tmp_path / "uploads" / "1.png").write_bytes(b"no picture")
    loader = input_loader(tmp_path.as_uri())
    with (
        pytest.raises(InvalidJob, match=r"inputs\.image\[1\]: is no picture"),
        loader.held(job(*uris), Ticket()),
    ):
        pass
    assert loader._budget.used == 0


class Loader:
    """Fetches nothing, and notes what is held."""

    def __init__(self) -> None:
        self.held_now = 0

    @contextmanager
    def held(self, job: Job, ticket: Ticket) -> Iterator[dict[str, list[object]]]:
        if ticket.over.is_set():
            raise Stopped
        self.held_now += 1
        yield {}
        self.held_now -= 1


def seats(released: list[str], name: str, rows: int = 1) -> Reservation:
    return Reservation(Announced(name, rows, 0.0), lambda announced: released.append(announced.key))


def test_a_slow_host_gives_its_seats_back() -> None:
    released: list[str] = []
    files = Files(Loader(), seats_s=0.05)  # type: ignore[arg-type]
    for name in ("a", "b", "c"):
        files.expect(Attempt(name, 1, "t"), Ticket(), seats(released, name))
    until(lambda: len(released) == 3)
    assert released == ["a", "b", "c"]
    files.expect(Attempt("d", 1, "t"), Ticket(), seats(released, "d"))
    files.expect(Attempt("e", 1, "t"), Ticket(), seats(released, "e", rows=0))
    files.expect(Attempt("f", 1, "t"), Ticket(), seats(released, "f"))
    until(lambda: "f" in released)
    assert released == ["a", "b", "c", "d", "f"], "whoever came has nothing to give back"


def test_seats_are_kept_for_a_while() -> None:
    released: list[str] = []
    files = Files(Loader(), seats_s=3600.0)  # type: ignore[arg-type]
    files.expect(Attempt("j", 1, "t"), Ticket(), seats(released, "a"))
    assert released == []


@pytest.mark.parametrize("told", ["before", "meanwhile"])
def test_an_attempt_that_is_not_wanted_ends_its_fetch(told: str) -> None:
    attempt, ticket = Attempt("j", 1, "t"), Ticket()
    files = Files(Loader())  # type: ignore[arg-type]
    if told == "before":
        attempt.over.set()
    files.expect(attempt, ticket, None)
    if told == "meanwhile":
        attempt.stop()
    with pytest.raises(Stopped):
        files.entered(job("s3://b/k"), ticket, lambda _: pytest.fail("it came into the engine"))


def test_files_are_held_until_the_engine_has_ended_with_them() -> None:
    loader, output = Loader(), Future[Output]()
    files = Files(loader)  # type: ignore[arg-type]
    handle = Handle("j", output, Stream(), lambda _: True)
    assert files.entered(job("s3://b/k"), Ticket(), lambda _: handle) is handle
    assert loader.held_now == 1
    output.set_exception(Cancelled("j"))
    assert loader.held_now == 0


def test_what_the_engine_does_not_take_is_held_no_longer(tmp_path: Path) -> None:
    (tmp_path / "uploads").mkdir()
    (tmp_path / "uploads" / "a.png").write_bytes(image())
    loader = input_loader(tmp_path.as_uri())

    def refuse(_: object) -> Handle:
        assert loader._budget.used > 0
        raise EngineClosed("no more")

    with pytest.raises(EngineClosed):
        Files(loader).entered(job((tmp_path / "uploads" / "a.png").as_uri()), Ticket(), refuse)
    assert loader._budget.used == 0


def test_the_settings_of_a_worker() -> None:
    environ = {
        "SAGGAR_INPUTS_FROM": "s3://photos/in, https://cdn.example",
        "SAGGAR_INPUTS_PRIVATE_HOSTS": "cdn.example",
        "SAGGAR_INPUTS_MAX_BYTES": "1000",
        "SAGGAR_INPUTS_MAX_SECONDS": "7.5",
        "SAGGAR_INPUTS_MEMORY_BYTES": "2000000",
    }
    settings = WorkerSettings.load({}, environ)
    policy = settings.input_policy("s3://results")
    assert policy.allowed == "s3://results/uploads/, s3://photos/in/, https://cdn.example/"
    assert policy.private_hosts == {"cdn.example"}
    assert settings.input_limits == Limits(bytes=1000, seconds=7.5, memory=2_000_000)
    flags = {"inputs_from": ("file:///srv/photos",), "inputs_max_bytes": None}
    assert WorkerSettings.load(flags, environ).inputs_from == ("file:///srv/photos",)
    assert WorkerSettings.from_parent({"SAGGAR_WORKER_SETTINGS": settings.handed_on}) == settings
    for wrong in ("http://cdn.example", "/srv/photos", "s3://"):
        with pytest.raises(ConfigError, match=r"--inputs-from: .+ is no source of input files \(allowed: "):
            WorkerSettings.load({"inputs_from": (wrong,)}, {})
