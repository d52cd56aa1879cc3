"""How much the cache of models from S3 may hold: what was used longest ago goes first, and never what is in use.

    {cache}/{place}/uses/{state}    locked by each process that uses the state, for as long as it lives; its time is
                                    that of the last use

A place changes under its lock alone (model_source.py), and in an order that a kill may cut short: first the state's
folder of links goes, at once, then the blobs that no other state has. The next one finds what a kill has left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from saggar.jobs.errors import ConfigError

GIB = 1 << 30
Tell = Callable[[str], None]


@dataclass(frozen=True)
class State:
    """A model as its S3 folder once was; `name` None: what a fetch that did not end has left. `used`: when a process
    last began or ended to use it, in seconds since 1970. `bytes` of its blobs, other states' among them.
    """

    place: Path
    name: str | None
    used: float
    bytes: int
    in_use: bool


@contextmanager
def using(place: Path, name: str) -> Iterator[None]:
    """Keeps the state from being removed, until the end or that of this process. Begin it under the place's lock."""
    path = place / "uses" / name
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        os.utime(path)
        try:
            yield
        finally:
            os.utime(path)


def states(cache: Path) -> list[State]:
    """What a cache has, in use for longest first."""
    found = [state for place in _places(cache) for state in _states_of(place)]
    return sorted(found, key=lambda state: state.used)


def held(cache: Path) -> int:
    """Bytes of all blobs, each once."""
    return sum(_size(blob) for place in _places(cache) for blob in (place / "blobs").iterdir())


def make_room(cache: Path, limit: int, place: Path, wanted: Mapping[Path, int], tell: Tell) -> None:
    """Removes states until the blobs `wanted`, whose sizes are given, are within the limit with all others.

    Call it under the lock of `place`, with `using` begun. ConfigError: they alone are not; when too much else is in use
    they go over it, and `tell` hears of that.
    """
    size = sum(wanted.values())
    if size > limit:
        raise ConfigError(
            f"SAGGAR_MODEL_CACHE_GIB or --model-cache-gib: the model takes {gib(size)} "
            f"(allowed: at least that; it is {gib(limit)})"
        )
    there = sum(_size(blob) + _size(_part(blob)) for blob in wanted)
    over = held(cache) - there + size - limit
    for state in states(cache):
        if over <= 0:
            return
        if not state.in_use:
            freed = _remove(state, place, wanted)
            over -= freed
            if freed:
                tell(f"removed {state.place.name} from the model cache: {gib(freed)}")
    if over > 0:
        tell(f"the model cache is over its limit of {gib(limit)} by {gib(over)}: the rest is in use")


def gib(size: int) -> str:
    """For people."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):.1f} MiB"


def _places(cache: Path) -> list[Path]:
    return [path for path in sorted(cache.absolute().glob("*")) if (path / "blobs").is_dir()]


def _states_of(place: Path) -> Iterator[State]:
    named: set[str] = set()
    for folder in _folders(place):
        blobs = _blobs_of(folder)
        named |= blobs
        use = place / "uses" / folder.name
        size = sum(_size(place / "blobs" / blob) for blob in blobs)
        yield State(place, folder.name, _time(use) or _time(folder), size, _in_use(use))
    left = [blob for blob in (place / "blobs").iterdir() if _whole_name(blob) not in named]
    if left:
        yield State(place, None, max(map(_time, left)), sum(map(_size, left)), in_use=False)


def _remove(state: State, ours: Path, keep: Container[Path]) -> int:
    """The bytes that came free, without the blobs in `keep`; none where somebody fetches or begins to use it."""
    if state.place != ours:
        with _lock_if_free(state.place / "lock") as locked:
            return _remove_locked(state, keep) if locked else 0
    return _remove_locked(state, keep)


def _remove_locked(state: State, keep: Container[Path]) -> int:
    place = state.place
    if state.name is not None:
        if _in_use(place / "uses" / state.name) or not (place / state.name).is_dir():
            return 0
        (place / state.name).rename(place / f".{uuid.uuid4().hex}")
        (place / "uses" / state.name).unlink(missing_ok=True)
    for left in place.glob(".*/"):  # this one, and what a kill has left
        shutil.rmtree(left)
    named = {blob for folder in _folders(place) for blob in _blobs_of(folder)}
    freed = 0
    for blob in list((place / "blobs").iterdir()):
        if (name := _whole_name(blob)) not in named and place / "blobs" / name not in keep:
            freed += _size(blob)
            blob.unlink()
    return freed


def _folders(place: Path) -> list[Path]:
    """Those of states."""
    others = ("blobs", "uses")
    return [
        path
        for path in sorted(place.iterdir())
        if path.is_dir() and path.name not in others and not path.name.startswith(".")
    ]


def _blobs_of(folder: Path) -> set[str]:
    """Names of the blobs that a state's links lead to."""
    return {
        os.path.basename(os.readlink(os.path.join(base, name)))
        for base, _, names in os.walk(folder)
        for name in names
        if os.path.islink(os.path.join(base, name))
    }


def _whole_name(blob: Path) -> str:
    return blob.name.removesuffix(".part")


def _part(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.part")


def _in_use(use: Path) -> bool:
    try:
        with use.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@contextmanager
def _lock_if_free(path: Path) -> Iterator[bool]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _size(path: Path) -> int:
    """0 for what is gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
