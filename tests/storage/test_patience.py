"""Which refusals are waited out, which are an object's own, and what is said of an outage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from saggar.storage.base import ObjectInfo
from saggar.storage.errors import StorageDenied, StorageRefused, StorageUnavailable
from saggar.storage.files import Data
from saggar.storage.local import LocalStorage
from saggar.storage.patience import Patience
from saggar.storage.retry import Backoff

QUICK = Backoff(base_s=0.001, cap_s=0.01)


class Store(LocalStorage):
    """Puts what `refuses` has no error for; remembers the keys."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.refuses: Callable[[str], Exception | None] = lambda _: None
        self.asked: list[str] = []

    def put(self, key: str, data: Data, *, content_type: str, metadata=None) -> ObjectInfo:
        self.asked.append(key)
        if (error := self.refuses(key)) is not None:
            raise error
        return super().put(key, data, content_type=content_type, metadata=metadata)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "objects")


def put(store: Store) -> None:
    store.put("out/k", b"x", content_type="text/plain")


def until_asked(store: Store, times: int) -> Callable[[], bool]:
    """Keeps going; from so many failures on the store takes everything."""
    failures: list[int] = []

    def keep_going() -> bool:
        failures.append(1)
        if len(failures) == times:
            store.refuses = lambda _: None
        return True

    return keep_going


def test_an_object_that_is_refused_by_itself_is_final(store: Store) -> None:
    store.refuses = lambda key: StorageRefused("not there") if key == "out/k" else None
    with pytest.raises(StorageRefused, match="not there"):
        Patience(store, QUICK).call(lambda: put(store), lambda: True)
    assert list(store.list("_probe")) == []


def test_one_that_is_refused_last_before_the_store_is_mended_is_not(store: Store) -> None:
    """Its trial meets a store that takes everything again."""
    answers = iter([StorageRefused("no"), None, StorageRefused("no"), None])
    store.refuses = lambda _: next(answers, None)
    Patience(store, QUICK).call(lambda: put(store), lambda: True)
    assert store.get("out/k") == b"x"


def test_a_store_that_refuses_everything_is_waited_for(store: Store) -> None:
    store.refuses = lambda _: StorageRefused("no such bucket")
    Patience(store, QUICK).call(lambda: put(store), until_asked(store, 5))
    assert store.get("out/k") == b"x"


def test_one_that_is_away_when_it_is_tried_is_waited_for_too(store: Store) -> None:
    store.refuses = lambda key: StorageRefused("no") if key == "out/k" else StorageUnavailable("away")
    Patience(store, QUICK).call(lambda: put(store), until_asked(store, 3))
    assert store.get("out/k") == b"x"


def test_one_that_creates_no_object_any_more_is_waited_for_too(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes those that may replace others, and no manifest."""
    asked: list[str] = []
    real = store.put_if_absent

    def put_if_absent(key: str, data: Data, *, content_type: str) -> bool:
        asked.append(key)
        if len(asked) < 8:
            raise StorageRefused("not implemented")
        return real(key, data, content_type=content_type)

    monkeypatch.setattr(store, "put_if_absent", put_if_absent)
    patience = Patience(store, QUICK)
    assert patience.call(lambda: store.put_if_absent("out/r", b"r", content_type="text/plain"), lambda: True)
    assert store.get("out/r") == b"r"
    assert list(store.list("_probe")) == [], "the trials that passed are gone, though the next were refused"


def test_a_trial_whose_answer_is_lost_leaves_nothing_either(store: Store) -> None:
    real = store.put

    def put_and_lose(key: str, data: Data, *, content_type: str, metadata=None) -> ObjectInfo:
        real(key, data, content_type=content_type, metadata=metadata)
        raise StorageUnavailable("the answer is lost")

    store.refuses = lambda key: StorageRefused("no") if key == "out/k" else None
    store.put = lambda key, *a, **k: (real if key == "out/k" else put_and_lose)(key, *a, **k)  # type: ignore[method-assign]
    Patience(store, QUICK).call(lambda: put(store), until_asked(store, 3))
    assert list(store.list("_probe")) == []


def test_trials_that_may_not_be_deleted_are_told_of_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def delete(_: object) -> None:
        raise StorageRefused("no permission")

    caplog.set_level("INFO")
    monkeypatch.setattr(store, "delete", delete)
    store.refuses = lambda key: StorageRefused("not there") if key == "out/k" else None
    with pytest.raises(StorageRefused, match="not there"):
        Patience(store, QUICK).call(lambda: put(store), lambda: True)
    assert [record.getMessage() for record in caplog.records] == [
        "trial objects may stay in the store: no permission"
    ]


def test_a_denial_is_tried_too(store: Store) -> None:
    """A store or a gateway may say of one object what it says of whoever asks."""
    store.refuses = lambda _: StorageDenied("the token has expired")
    Patience(store, QUICK).call(lambda: put(store), until_asked(store, 3))
    assert store.get("out/k") == b"x"
    store.refuses = lambda key: StorageDenied("not this one") if key == "out/k" else None
    with pytest.raises(StorageDenied, match="not this one"):
        Patience(store, QUICK).call(lambda: put(store), lambda: True)
    assert list(store.list("_probe")) == []


def test_nobody_waits_who_wants_nothing_any_more(store: Store) -> None:
    store.refuses = lambda _: StorageRefused("no such bucket")
    with pytest.raises(StorageUnavailable, match="no such bucket"):
        Patience(store, QUICK).call(lambda: put(store), lambda: False)
    stop = threading.Event()
    stop.set()
    with pytest.raises(StorageUnavailable):
        Patience(store, Backoff(3600, 3600)).call(lambda: put(store), lambda: True, stop)


def test_an_outage_is_told_once_with_its_reason_and_so_is_its_end(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    patience = Patience(store, QUICK)
    put(store)
    for _ in range(2):
        store.refuses = lambda _: StorageUnavailable("the line is cut")
        patience.call(lambda: put(store), until_asked(store, 5))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2, "the second outage, a moment later, is not"
    assert told[0].endswith("takes nothing now; trying on, nothing is lost: the line is cut")
    assert "answers again" in told[1]
