"""Publishing while the spool takes nothing: whoever waits is asked, and never in a busy loop."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from saggar.engine.request import Output
from saggar.jobs.schema import Job
from saggar.storage.errors import StorageUnavailable
from saggar.storage.local import LocalStorage
from saggar.storage.spool import Spool, SpoolItem
from saggar.workers import publish
from saggar.workers.publish import Origin, Publisher

JOB = Job.model_validate({"id": "j", "model": "noop", "prompt": "p", "seed": 1, "output": {"format": "png"}})
OUTPUT = Output("j", [np.zeros((8, 8, 3), np.uint8)], [1], "b", 1, 4, {}, "")


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", 1 << 20)


@pytest.fixture
def publisher(spool: Spool, tmp_path: Path) -> Publisher:
    return Publisher(LocalStorage(tmp_path / "objects"), spool, Origin("noop", "r1", {}))


@pytest.fixture(params=["quota", "limit"])
def full(request: pytest.FixtureRequest, spool: Spool, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A spool that refuses: the disk, which says that it has room, or its own limit."""
    monkeypatch.setattr(publish, "_LOOK_S", 0.01)
    if request.param == "limit":
        spool.write("other", 1, [SpoolItem("o", b"x" * (1 << 20), "image/png")])
        return monkeypatch

    def refuse(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", refuse)
    return monkeypatch


def test_each_refusal_is_a_question_and_a_pause(
    publisher: Publisher, spool: Spool, full: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    wait = spool.wait_for_room

    def waited(needed: int, timeout_s: float) -> bool:
        said.append("pause")
        room = wait(needed, timeout_s)
        assert not room, "there is none, whatever the disk says"
        return room

    def wanted() -> bool:
        said.append("wanted?")
        return said.count("wanted?") < 4

    full.setattr(spool, "wait_for_room", waited)
    with pytest.raises(StorageUnavailable, match="the spool stayed full"):
        publisher.upload(JOB, 1, OUTPUT, wanted)
    assert said == ["wanted?", "pause"] * 3 + ["wanted?"]


def test_it_goes_on_once_there_is_room(
    publisher: Publisher, spool: Spool, full: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[int] = []

    def wanted() -> bool:
        asked.append(1)
        if len(asked) == 3:
            full.undo()
            spool.limit_bytes <<= 1
        return True

    upload = publisher.upload(JOB, 1, OUTPUT, wanted)
    publisher.forget(upload)
    assert publisher.storage.get(upload.manifest.outputs[0].key)
    assert len(asked) == 3
