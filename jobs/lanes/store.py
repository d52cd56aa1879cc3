"""The lanes of one Redis, typed: one method for each script, no state, no thread.

Every command may be sent twice (redis-py repeats one whose reply it did not see): a repeated put, fetch, ack,
requeue or extend changes nothing more and answers the same. Raises redis.RedisError, and nothing of its own.
"""

import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from saggar.jobs.lanes.message import LaneMessage, Tag, lane_base
from saggar.jobs.lanes.script import ALLOW_OOM, knows_flags, script

if TYPE_CHECKING:
    import redis

logger = logging.getLogger(__name__)

ANY_CLASS = 9
# What empties a lane or keeps its leases must work on a server at its memory limit; a put must not.
_DRAINS = frozenset({"fetch", "ack", "requeue", "extend", "sweep", "purge"})


class Outcome(StrEnum):
    """What became of an acknowledgement or a return."""

    DONE = "done"
    DEAD = "dead"  # returned once too often: it is a dead letter now
    GONE = "gone"  # the message does not exist any more: acknowledged before, or purged
    STALE = "stale"  # refused: it was delivered again since, or given back
    FAILED = "failed"  # the script failed, over a record that somebody has damaged: the lease will run out


@dataclass(frozen=True, slots=True)
class Delivery:
    """One leased message: its tag, how many rows it makes, kombu's JSON text."""

    tag: Tag
    rows: int
    body: str


@dataclass(frozen=True, slots=True)
class Batch:
    """What one fetch leased: messages of one class and one batch key, oldest first."""

    key: str
    priority_class: int
    deliveries: tuple[Delivery, ...]

    @property
    def rows(self) -> int:
        return sum(d.rows for d in self.deliveries)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that was delivered too often. `at_us`: when it was given up, microseconds since the epoch."""

    tag: str
    at_us: int
    deliveries: int
    body: str


@dataclass(frozen=True, slots=True)
class LaneSize:
    """Messages of a lane. `delayed` are not yet due."""

    waiting: int
    delayed: int
    leased: int
    dead: int


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """What a lane goes by; kept in Redis, so that producers need not know it. None = as it is.

    `max_batch`: rows of a full batch. `age_bound_s`: a key whose oldest message waits longer comes first
    when a batch begins. `lease_s`: how long a delivery lasts without a heartbeat. `liveness_s`: how long a
    process may be silent. `max_deliveries`: counted deliveries after which a returned message is a dead
    letter.
    """

    max_batch: int | None = None
    age_bound_s: float | None = None
    lease_s: float | None = None
    liveness_s: float | None = None
    max_deliveries: int | None = None

    def stored(self) -> dict[str, int]:
        """As the scripts keep them: times in microseconds, without the unit's suffix."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {
            name.removesuffix("_s"): int(value * 1_000_000) if name.endswith("_s") else int(value)
            for name, value in named
            if value is not None
        }


_ACK = {1: Outcome.DONE, 2: Outcome.DEAD, 0: Outcome.GONE, -1: Outcome.STALE}


class LaneStore:
    """`client`: any redis.Redis, decoding responses or not. `prefix` goes before every key."""

    def __init__(self, client: "redis.Redis", prefix: str = "") -> None:
        self.client = client
        self.prefix = prefix
        self._scripts: dict[str, Any] = {}
        self._full_flags: str | None = None

    def base(self, lane: str) -> str:
        return lane_base(self.prefix, lane)

    def bell(self, lane: str) -> str:
        """The pub/sub channel of a lane."""
        return f"{self.base(lane)}:bell"

    def _script(self, name: str) -> Any:
        if name not in self._scripts:
            self._scripts[name] = self.client.register_script(self._text(name))
        return self._scripts[name]

    def _text(self, name: str) -> str:
        return (self._flags() if name in _DRAINS else "") + script(name)

    def _run(self, name: str, lane: str, *args: str | int) -> Any:
        return self._script(name)(keys=[self.base(lane)], args=args)

    def _flags(self) -> str:
        """What lets a script run on a full server, known since Redis 7 (and to no server without INFO)."""
        from redis import ResponseError

        if self._full_flags is None:
            try:
                info: Mapping[str, object] = self.client.info("server")
            except ResponseError:  # a stand-in without INFO
                info = {}
            self._full_flags = ALLOW_OOM if knows_flags(info) else ""
        return self._full_flags

    def put(self, message: LaneMessage) -> bool:
        """False when this very message is already there."""
        return bool(self._run("put", message.lane, *message.args()) == 1)

    def fetch(
        self,
        lane: str,
        owner: str,
        *,
        rows: int,
        seats: int,
        open_key: str | None = None,
        room: int = 0,
        lowest_class: int = ANY_CLASS,
        token: str | None = None,
    ) -> Batch | None:
        """Leases to `owner` up to `seats` messages of one batch key; the first one however many rows it has.

        Into the open group (`open_key` with `room` > 0) if it has messages in the highest class present, at
        most `room` rows; else a new batch begins, of at most `rows` and `max_batch` rows (none if `rows` is 0).

        No key starves: once a message has waited `age_bound_s`, each batch that begins takes a message older than
        it, or it; so with no higher class waiting it starts at most as many batches later as older messages were
        waiting then, plus the one that was open.

        `lowest_class`: classes with a higher number are left alone. `token`: repeat a fetch under the same one.
        """
        reply = self._run(
            "fetch",
            lane,
            owner,
            token or uuid.uuid4().hex,
            (open_key or "") if room > 0 else "",
            room,
            rows,
            seats,
            lowest_class,
        )
        if not reply:
            return None
        key, priority_class, *rest = reply
        deliveries = tuple(
            Delivery(Tag(lane, _text(tag), int(n)), int(rows_), _text(body))
            for tag, n, rows_, body in zip(*[iter(rest)] * 4, strict=True)
        )
        return Batch(_text(key), int(priority_class), deliveries)

    def ack(self, tag: Tag) -> Outcome:
        return _ACK[self._run("ack", tag.lane, tag.id, tag.delivery)]

    def ack_many(self, tags: Sequence[Tag]) -> list[Outcome]:
        """In one round trip; in more where the server does not know the script yet. One that fails is no fault of
        the others."""
        from redis.exceptions import NoScriptError

        if not tags:
            return []
        pipe = self.client.pipeline(transaction=False)
        for tag in tags:
            pipe.evalsha(self._script("ack").sha, 1, self.base(tag.lane), tag.id, tag.delivery)
        replies = pipe.execute(raise_on_error=False)
        if any(isinstance(reply, NoScriptError) for reply in replies):
            pipe.script_load(self._text("ack"))
            for tag in tags:  # what was told already is told again, and answers the same
                pipe.evalsha(self._script("ack").sha, 1, self.base(tag.lane), tag.id, tag.delivery)
            _, *replies = pipe.execute(raise_on_error=False)
        return [_acked(tag, reply) for tag, reply in zip(tags, replies, strict=True)]

    def requeue(self, tag: Tag, *, counted: bool = True, due_us: int = 0) -> Outcome:
        """Back to its old place, or aside until `due_us`; not `counted`: as if never delivered."""
        return _ACK[self._run("requeue", tag.lane, tag.id, tag.delivery, int(counted), due_us)]

    def extend(self, lane: str, owner: str, tags: Iterable[Tag]) -> list[Tag]:
        """A sign of life of `owner` and a new lease for each tag. Returns those it has lost."""
        by_id = {tag.id: tag for tag in tags}
        pairs = [value for tag in by_id.values() for value in (tag.id, tag.delivery)]
        return [by_id[_text(id_)] for id_ in self._run("extend", lane, owner, *pairs)]

    def sweep(self, lane: str, dead_owner: str = "") -> tuple[int, list[str]]:
        """Returns what nobody works on any more; `dead_owner` is known to be dead and not waited for.

        Returns how many messages came back or became due, and the tags that became dead letters.
        """
        returned, *dead = self._run("sweep", lane, dead_owner)
        return int(returned), [_text(tag) for tag in dead]

    def purge(self, lane: str, *, everything: bool = False) -> int:
        """Forgets messages that wait or are not yet due; with `everything` also the leased and dead ones.

        Returns how many. Work that is under way goes on, and its acknowledgement finds nothing.
        """
        total = 0
        while count := int(self._run("purge", lane, int(everything))):
            total += count
        return total

    def expedite(self, lane: str, job_id: str) -> bool:
        """Moves a waiting message to the head of the lane; False when it does not wait."""
        return bool(self._run("expedite", lane, job_id) == 1)

    def position(self, lane: str, job_id: str) -> int | None:
        """How many messages come before it by class and age (0 = next); None when it does not wait."""
        rank = self._run("position", lane, job_id)
        return None if rank is None else int(rank)

    def size(self, lane: str) -> LaneSize:
        base = self.base(lane)
        pipe = self.client.pipeline(transaction=False)
        pipe.hlen(f"{base}:m")
        for key in ("d", "l", "x"):
            pipe.zcard(f"{base}:{key}")
        total, delayed, leased, dead = pipe.execute()
        return LaneSize(max(0, total - delayed - leased - dead), delayed, leased, dead)

    def dead_letters(self, lane: str, first: int = 0, count: int = 100) -> list[DeadLetter]:
        """Oldest first."""
        reply = self._run("dead", lane, first, first + count - 1)
        quads = zip(*[iter(reply)] * 4, strict=True)
        return [DeadLetter(_text(tag), int(at), int(n), _text(body)) for tag, at, n, body in quads]

    def revive(self, lane: str, tag: str) -> bool:
        """A dead letter waits again, at its old place, its deliveries counted anew. False: there is none."""
        return bool(self._run("revive", lane, tag, 1) == 1)

    def drop_dead(self, lane: str, tag: str) -> bool:
        """Forgets a dead letter. False: there is none."""
        return bool(self._run("revive", lane, tag, 0) == 1)

    def configure(self, lane: str, settings: LaneSettings) -> None:
        """Sets what `settings` names; the rest stays (the defaults stand in scripts/lib.lua)."""
        pairs = [value for pair in settings.stored().items() for value in pair]
        self._run("configure", lane, *pairs)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _acked(tag: Tag, reply: int | Exception) -> Outcome:
    from redis.exceptions import ResponseError

    if isinstance(reply, ResponseError):
        logger.error("the acknowledgement of %s failed: %s", tag.id, reply)
        return Outcome.FAILED
    if isinstance(reply, Exception):
        raise reply
    return _ACK[reply]
