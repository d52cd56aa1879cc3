"""Inputs in hand: within the memory that is given to them, and not in the seats of others for long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from saggar.engine.handle import Reservation
from saggar.engine.sched.base import Announced
from saggar.jobs.errors import ConfigError
from saggar.jobs.schema import Job
from saggar.workers.attempts import Attempt
from saggar.workers.inputs import hold
from saggar.workers.inputs.budget import Budget
from saggar.workers.inputs.decoders import Stopped
from saggar.workers.inputs.fetch import Ticket
from saggar.workers.inputs.hold import fetched
from saggar.workers.inputs.policy import Limits
from saggar.workers.settings import WorkerSettings

from tests.support.inputs import image, input_loader
from tests.support.wait import until


def job(*uris: str) -> Job:
    fields = {"model": "noop", "prompt": "p", "task": "i2i", "inputs": {"image": list(uris)}}
    return Job.model_validate(fields)


def test_many_jobs_at_once_stay_within_the_memory(tmp_path: Path) -> None:
    (tmp_path / "uploads").mkdir()
    (tmp_path / "uploads" / "a.png").write_bytes(image(size=(100, 100)))
    uri = (tmp_path / "uploads" / "a.png").as_uri()
    peak = 100 * 100 * 12
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


class Slow:
    """A loader that has the inputs once it is told."""

    def __init__(self) -> None:
        self.go = threading.Event()

    @contextmanager
    def held(self, job: Job, ticket: Ticket) -> Iterator[dict[str, list[object]]]:
        while not self.go.wait(0.01):
            if ticket.over.is_set():
                raise Stopped
        yield {}


def test_a_slow_host_gives_its_seats_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold, "SEATS_S", 0.05)
    released = threading.Event()
    seats = Reservation(Announced("key", 1, 0.0), lambda _: released.set())
    loader = Slow()

    def work() -> None:
        with fetched(loader, job("s3://b/k"), Attempt("j", 1, "t"), seats):  # type: ignore[arg-type]
            return

    thread = threading.Thread(target=work)
    thread.start()
    assert released.wait(60)
    loader.go.set()
    thread.join(60)


@pytest.mark.parametrize("told", ["before", "meanwhile"])
def test_an_attempt_that_is_not_wanted_ends_its_fetch(told: str) -> None:
    attempt = Attempt("j", 1, "t")
    if told == "before":
        attempt.over.set()
    else:
        threading.Timer(0.05, attempt.stop).start()
    with pytest.raises(Stopped), fetched(Slow(), job("s3://b/k"), attempt, None):  # type: ignore[arg-type]
        pass


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
        with pytest.raises(ConfigError, match=r"inputs_from: .+ is no source of input files \(allowed: "):
            WorkerSettings.load({"inputs_from": (wrong,)}, {})
