"""The manifest is written once, and whoever comes second gets the first one, whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from threading import Barrier

import pytest
from saggar.storage.base import Storage
from saggar.storage.errors import Conflict, NotFound
from saggar.storage.keys import output_key, result_key, sidecar_key
from saggar.storage.local import LocalStorage
from saggar.storage.results import (
    ManifestFile,
    ManifestOutput,
    ResultManifest,
    commit_result,
    read_result,
    spec_digest,
    verify_result,
)

KEY = result_key("out", "job")
SPEC = spec_digest({"prompt": "a jar", "seed": 7})


class WithoutConditionalPut(LocalStorage):
    @property
    def conditional_put(self) -> bool:
        return False


def made(storage: Storage, attempt: int, *, spec: str = SPEC, job_id: str = "job") -> ResultManifest:
    """An attempt's manifest, its objects put."""
    picture, words = b"picture of %d" % attempt, b"{}"
    sha = hashlib.sha256(picture).hexdigest()
    key, beside = (
        output_key("out", job_id, attempt, 0, sha, "png"),
        sidecar_key("out", job_id, attempt, 0, sha),
    )
    storage.put(key, picture, content_type="image/png")
    storage.put(beside, words, content_type="application/json")
    sidecar = ManifestFile(
        key=beside, sha256=hashlib.sha256(words).hexdigest(), size=2, content_type="application/json"
    )
    output = ManifestOutput(
        key=key,
        sha256=sha,
        size=len(picture),
        content_type="image/png",
        index=0,
        width=8,
        height=8,
        seed=7,
        sidecar=sidecar,
    )
    return ResultManifest(
        job_id=job_id,
        attempt=attempt,
        spec_sha256=spec,
        model="m",
        created=datetime.now(UTC),
        outputs=(output,),
        batch_id="b",
        batch_size=4,
        timings={"denoise": 0.1 + 0.2},
    )


def test_the_first_wins_and_the_second_reports_it(store: Storage) -> None:
    first, second = made(store, 1), made(store, 2)
    outcome = commit_result(store, KEY, first)
    assert (outcome.won, outcome.manifest) == (True, first)
    outcome = commit_result(store, KEY, second)
    assert (outcome.won, outcome.manifest) == (False, first)
    assert read_result(store, KEY) == first


def test_one_that_comes_back_after_a_crash_still_won(store: Storage) -> None:
    first = made(store, 1)
    commit_result(store, KEY, first)
    outcome = commit_result(store, KEY, ResultManifest.model_validate_json(first.to_bytes()))
    assert (outcome.won, outcome.manifest) == (True, first)


def test_attempts_that_race(store: Storage) -> None:
    manifests = [made(store, attempt) for attempt in range(1, 5)]
    assert store.conditional_put
    start = Barrier(len(manifests))

    def run(manifest: ResultManifest) -> bool:
        start.wait(30)
        return commit_result(store, KEY, manifest).won

    with ThreadPoolExecutor(len(manifests)) as pool:
        won = list(pool.map(run, manifests))
    assert won.count(True) == 1
    assert read_result(store, KEY) == manifests[won.index(True)]


def test_the_result_of_another_request_is_a_conflict(store: Storage) -> None:
    commit_result(store, KEY, made(store, 1, spec=spec_digest({"prompt": "a cup"})))
    with pytest.raises(Conflict, match="another request"):
        commit_result(store, KEY, made(store, 2))


def test_a_result_whose_object_is_gone_is_a_conflict(store: Storage) -> None:
    first = made(store, 1)
    commit_result(store, KEY, first)
    store.delete([first.outputs[0].key])
    with pytest.raises(Conflict, match="not in the store"):
        commit_result(store, KEY, made(store, 2))


def test_a_result_whose_bytes_differ_is_a_conflict(store: Storage) -> None:
    first = made(store, 1)
    commit_result(store, KEY, first)
    assert first.outputs[0].sidecar is not None
    store.put(first.outputs[0].sidecar.key, b"[]", content_type="application/json")
    with pytest.raises(Conflict, match="other bytes"):
        verify_result(store, first)


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"version": 1}', b"\xff"])
def test_something_else_in_the_manifest_s_place_is_a_conflict(
    local_store: LocalStorage, garbage: bytes
) -> None:
    local_store.put(KEY, garbage, content_type="application/json")
    with pytest.raises(Conflict, match="no manifest"):
        commit_result(local_store, KEY, made(local_store, 1))


def test_no_result_yet(local_store: LocalStorage) -> None:
    with pytest.raises(NotFound):
        read_result(local_store, KEY)


def test_a_store_without_conditional_put(tmp_path) -> None:
    """There the caller's own judge has decided who may come; the result is written, and never replaced."""
    storage = WithoutConditionalPut(tmp_path)
    first, second = made(storage, 1), made(storage, 2)
    assert commit_result(storage, KEY, first).won
    assert commit_result(storage, KEY, first).won
    outcome = commit_result(storage, KEY, second)
    assert (outcome.won, outcome.manifest) == (False, first)


def different_specs() -> Iterator[dict[str, object]]:
    yield {"a": 1}
    yield {"a": 1.5}
    yield {"a": "1"}
    yield {"a": None}
    yield {"b": 1}
    yield {"a": [1, 2]}
    yield {"a": [2, 1]}


def test_digests_tell_requests_apart_and_ignore_the_order_of_fields() -> None:
    digests = [spec_digest(spec) for spec in different_specs()]
    assert len(set(digests)) == len(digests)
    assert spec_digest({"a": 1, "b": {"c": 2, "d": "ü"}}) == spec_digest({"b": {"d": "ü", "c": 2}, "a": 1})
    with pytest.raises(ValueError, match="JSON"):
        spec_digest({"a": float("nan")})


def test_a_manifest_of_pictures_has_no_name_that_older_readers_do_not_know(local_store: LocalStorage) -> None:
    """They take no other: clusters are upgraded while results are read."""
    manifest = made(local_store, 1)
    (output,) = json.loads(manifest.to_bytes())["outputs"]
    assert output.keys() == {
        "key", "sha256", "size", "content_type", "index", "width", "height", "seed", "sidecar",
    }  # fmt: skip
    moving = manifest.outputs[0].model_copy(update={"frames": 9, "fps": 8.0, "part": 0})
    whole = manifest.model_copy(update={"outputs": (moving,)})
    assert ResultManifest.model_validate_json(whole.to_bytes()) == whole
    (output,) = json.loads(whole.to_bytes())["outputs"]
    assert (output["frames"], output["fps"], output["part"]) == (9, 8.0, 0)
