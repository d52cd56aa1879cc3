"""What must hold in Redis for every lane after every operation, read from outside the scripts."""

from __future__ import annotations

from dataclasses import dataclass

import redis
from saggar.jobs.lanes import LaneStore

FIELDS = ("class", "at", "rows", "n", "free", "uuid", "owner", "key", "body")


@dataclass
class Snapshot:
    records: dict[str, dict[str, str]]
    waiting: set[str]
    delayed: set[str]
    leased: set[str]
    dead: set[str]


def text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def texts(values) -> list[str]:
    return [text(value) for value in values]


def snapshot(store: LaneStore, lane: str) -> Snapshot:
    """Reads the lane and asserts that its indexes agree with each other."""
    r, base = store.client, store.base(lane)
    records = {
        text(tag): dict(zip(FIELDS, text(v).split("\x1f", 8), strict=True))
        for tag, v in r.hgetall(f"{base}:m").items()
    }
    waiting = check_waiting(r, base, records, int(text(r.hget(f"{base}:cfg", "max_batch") or b"8")))
    delayed, leased, dead = (set(texts(r.zrange(f"{base}:{s}", 0, -1))) for s in "dlx")
    places = [waiting, delayed, leased, dead]
    assert set().union(*places) == records.keys(), "a message rests nowhere, or a place has no message"
    assert sum(map(len, places)) == len(records), "a message rests in two places"
    owned = {
        (text(key).removeprefix(f"{base}:o:"), tag)
        for key in r.keys(f"{base}:o:*")
        for tag in texts(r.smembers(key))
    }
    assert owned == {(records[tag]["owner"], tag) for tag in leased}
    assert {owner for owner, _ in owned} <= set(texts(r.zrange(f"{base}:p", 0, -1)))
    return Snapshot(records, waiting, delayed, leased, dead)


def check_waiting(r: redis.Redis, base: str, records: dict[str, dict[str, str]], max_batch: int) -> set[str]:
    classes = texts(r.zrange(f"{base}:c", 0, -1))
    assert {text(key).rsplit(":", 1)[1] for key in r.keys(f"{base}:a:*")} == set(classes)
    waiting: set[str] = set()
    for c in classes:
        ages = {text(t): s for t, s in r.zrange(f"{base}:a:{c}", 0, -1, withscores=True)}
        heads = {text(k): s for k, s in r.zrange(f"{base}:k:{c}", 0, -1, withscores=True)}
        assert {records[tag]["key"] for tag in ages} == heads.keys()
        for key, head in heads.items():
            own = {text(t): s for t, s in r.zrange(f"{base}:w:{c}:{key}", 0, -1, withscores=True)}
            assert own == {tag: at for tag, at in ages.items() if records[tag]["key"] == key}
            assert all(float(records[tag]["at"]) == at for tag, at in own.items())
            assert head == min(own.values())
            rows = sum(int(records[tag]["rows"]) for tag in own)
            assert int(r.hget(f"{base}:r:{c}", key)) == rows
            full = r.zscore(f"{base}:f:{c}", key)
            assert full == (head if rows >= max_batch else None)
        assert r.hlen(f"{base}:r:{c}") == len(heads)
        assert all(int(records[tag]["class"]) == int(c) for tag in ages)
        waiting |= ages.keys()
    return waiting
