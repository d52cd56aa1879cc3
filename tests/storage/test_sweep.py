"""A sweep removes what ended jobs have left without a result, and losers of those with one: nothing else."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from saggar.storage.base import Storage
from saggar.storage.errors import StorageRefused, StorageUnavailable
from saggar.storage.keys import result_key
from saggar.storage.local import LocalStorage
from saggar.storage.results import commit_result, verify_result
from saggar.storage.sweep import SweepReport, sweep

from tests.storage.test_results import KEY, made

TOMORROW = datetime.now(UTC) + timedelta(days=1, hours=1)
NOTHING = SweepReport(0, 0, 0)


def always(job_id: str) -> bool:
    return True


def test_losers_go_and_the_winner_stays(store: Storage) -> None:
    winner = made(store, 2)
    for attempt in (1, 3):
        made(store, attempt)
    commit_result(store, KEY, winner)
    report = sweep(store, ended_without_result=always, now=TOMORROW)
    assert (report.objects, report.freed_bytes) == (4, 2 * len(b"picture of 1{}"))
    verify_result(store, winner)
    assert len(list(store.list(""))) == 3
    assert sweep(store, ended_without_result=always, now=TOMORROW) == NOTHING


def test_what_is_young_stays(store: Storage) -> None:
    made(store, 1)
    assert sweep(store, ended_without_result=always) == NOTHING
    assert len(list(store.list(""))) == 2


def test_only_jobs_that_ended_without_a_result_lose_everything(store: Storage) -> None:
    """Others without a manifest may be open, another cluster's, or a success before its manifest was written."""
    for job_id in ("cancelled", "succeeded"):
        made(store, 1, job_id=job_id)
    asked = []

    def ended_without_result(job_id: str) -> bool:
        asked.append(job_id)
        return job_id == "cancelled"

    assert sweep(store, ended_without_result=ended_without_result, now=TOMORROW).objects == 2
    assert sorted(asked) == ["cancelled", "succeeded"]
    assert [info.key.split("/")[1] for info in store.list("")] == ["succeeded"] * 2


def test_only_the_prefix_is_swept(store: Storage) -> None:
    made(store, 1)
    store.put("elsewhere/job/a1/0-01234567.png", b"x", content_type="image/png")
    assert sweep(store, ended_without_result=always, prefix="out/", now=TOMORROW).objects == 2
    assert [info.key for info in store.list("")] == ["elsewhere/job/a1/0-01234567.png"]


def test_what_is_no_attempt_s_object_is_left_alone(store: Storage) -> None:
    keys = [
        "a1/x",
        "out/job/a1/deeper/x",
        "out/job/notes.txt",
        "papers/a4/scan.pdf",
        "runs/a12/result.json",
        "shards/00001.tar",
    ]
    for key in keys:
        store.put(key, b"x", content_type="text/plain")
    assert sweep(store, ended_without_result=always, now=TOMORROW) == NOTHING
    assert [info.key for info in store.list("")] == keys


def test_a_foreign_key_that_is_none_of_ours_disturbs_nothing(local_store: LocalStorage) -> None:
    made(local_store, 1)
    foreign = Path(urlsplit(local_store.uri("x")).path).parent / "my pictures" / "a1" / "0-01234567.png"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"x")
    assert sweep(local_store, ended_without_result=always, now=TOMORROW).objects == 2
    assert foreign.exists()


def test_a_job_whose_manifest_cannot_be_read_stays_and_the_sweep_goes_on(store: Storage) -> None:
    for job_id in ("before", "job", "later"):
        made(store, 1, job_id=job_id)
    store.put(result_key("out", "job"), b"{", content_type="application/json")
    report = sweep(store, ended_without_result=always, now=TOMORROW)
    assert (report.objects, report.skipped) == (4, 1)
    assert [info.key.split("/")[1] for info in store.list("")] == ["job"] * 3


def test_a_refusal_is_one_job_s_and_an_outage_ends_the_sweep(local_store: LocalStorage) -> None:
    made(local_store, 1, job_id="job")
    made(local_store, 1, job_id="locked")

    class Locked(LocalStorage):
        error: Exception = StorageRefused("no")

        def get(self, key: str) -> bytes:
            if "locked" in key:
                raise self.error
            return super().get(key)

    storage = Locked(Path(urlsplit(local_store.uri("x")).path).parent)
    report = sweep(storage, ended_without_result=always, now=TOMORROW)
    assert (report.objects, report.skipped) == (2, 1)
    storage.error = StorageUnavailable("away")
    with pytest.raises(StorageUnavailable):
        sweep(storage, ended_without_result=always, now=TOMORROW)
