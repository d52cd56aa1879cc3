"""A sweep removes what no result names and no open job may want, and nothing else."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from saggar.storage.base import Storage
from saggar.storage.errors import Conflict
from saggar.storage.keys import result_key
from saggar.storage.results import commit_result, verify_result
from saggar.storage.sweep import SweepReport, sweep

from tests.storage.test_results import KEY, made

TOMORROW = datetime.now(UTC) + timedelta(days=1, hours=1)
NOTHING = SweepReport(0, 0, 0)


def nobody(job_id: str) -> bool:
    return False


def test_losers_go_and_the_winner_stays(store: Storage) -> None:
    winner = made(store, 2)
    for attempt in (1, 3):
        made(store, attempt)
    commit_result(store, KEY, winner)
    report = sweep(store, is_open=nobody, now=TOMORROW)
    assert (report.objects, report.freed_bytes) == (4, 2 * len(b"picture of 1{}"))
    verify_result(store, winner)
    assert len(list(store.list(""))) == 3
    assert sweep(store, is_open=nobody, now=TOMORROW) == NOTHING


def test_what_is_young_stays(store: Storage) -> None:
    made(store, 1)
    assert sweep(store, is_open=nobody) == NOTHING
    assert len(list(store.list(""))) == 2


def test_open_jobs_keep_everything_and_ended_ones_without_result_nothing(store: Storage) -> None:
    made(store, 1, job_id="open")
    made(store, 1, job_id="cancelled")
    asked = []

    def is_open(job_id: str) -> bool:
        asked.append(job_id)
        return job_id == "open"

    assert sweep(store, is_open=is_open, now=TOMORROW).objects == 2
    assert sorted(asked) == ["cancelled", "open"]
    assert all(info.key.startswith("out/open/") for info in store.list(""))


def test_only_the_prefix_is_swept(store: Storage) -> None:
    made(store, 1)
    store.put("elsewhere/job/a1/0-x.png", b"x", content_type="image/png")
    assert sweep(store, is_open=nobody, prefix="out/", now=TOMORROW).objects == 2
    assert [info.key for info in store.list("")] == ["elsewhere/job/a1/0-x.png"]


def test_what_is_no_attempt_s_object_is_left_alone(store: Storage) -> None:
    for key in ("shards/00001.tar", "out/job/notes.txt", "a1/x", "out/job/a1/deeper/x"):
        store.put(key, b"x", content_type="text/plain")
    assert sweep(store, is_open=nobody, now=TOMORROW) == NOTHING


def test_an_unreadable_manifest_stops_the_sweep(store: Storage) -> None:
    made(store, 1)
    store.put(result_key("out", "job"), b"{", content_type="application/json")
    with pytest.raises(Conflict):
        sweep(store, is_open=nobody, now=TOMORROW)
    assert len(list(store.list(""))) == 3
