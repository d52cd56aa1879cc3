"""The lanes of a process: what it holds, the heartbeat that keeps it, the endings Redis has not heard of.

All of this belongs to the process, never to a channel or connection of kombu's, for work outlives both.
Knows nothing of kombu or Celery.
"""

import logging
import os
import socket
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saggar.jobs.lanes.appetite import Appetite, PrefetchAppetite, Want
from saggar.jobs.lanes.message import LaneMessage, Tag
from saggar.jobs.lanes.store import Batch, LaneStore, Outcome

if TYPE_CHECKING:
    import redis

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Ending:
    """An acknowledgement or a return, kept until Redis has taken it."""

    tag: Tag
    acked: bool
    counted: bool = True
    due_us: int = 0


class Lanes:
    """Thread-safe. `client` needs a pool of its own, short timeouts and few retries (see broker.py).

    The heartbeat keeps what a task has started on; what none has taken up within `start_s` goes back, for whoever
    was to do it has been lost. Hooks, called with the lock released: `on_lost(tag)`: another process may have it
    now, `on_dead(lane, job_id)`: it became a dead letter.
    """

    def __init__(
        self,
        client: "redis.Redis",
        prefix: str = "",
        *,
        appetite: Appetite | None = None,
        heartbeat_s: float = 3.0,
        urgent_seats: int = 2,
        start_s: float = 60.0,
    ) -> None:
        self.store = LaneStore(client, prefix)
        # Unique for each start: a restarted container has the host name and process id of its dead
        # forerunner.
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self.appetite: Appetite = appetite or PrefetchAppetite()
        self.heartbeat_s = heartbeat_s
        self.urgent_seats = urgent_seats
        self.draining = False
        self.start_s = start_s
        self._lost_hooks: list[Callable[[str], None]] = []
        self._dead_hooks: list[Callable[[str, str], None]] = []
        self._wakers: set[Callable[[], None]] = set()
        self._held: dict[str, float | None] = {}  # tag -> when a task must have started on it; None: one has
        self._outbox: dict[str, _Ending] = {}
        self._no_urgent: set[str] = set()  # lanes without interactive messages when last looked at
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None

    # --- messages

    def put(self, message: LaneMessage) -> bool:
        return self.store.put(message)

    def take(self, lane: str, prefetch: int) -> Batch | None:
        """Fetches what the appetite wants and `prefetch` (0 = no limit) allows, and holds it.

        The last `urgent_seats` seats are kept for interactive messages, if prefetch is large enough to
        spare them.
        """
        if self.draining:
            return None
        free = prefetch - self.in_hand() if prefetch else 1 << 16
        spared = self.urgent_seats if prefetch > 2 * self.urgent_seats else 0
        batch = self._fetch(lane, self.appetite.want(lane, max(free, 0)), free, free - spared)
        if batch:
            tags = [str(delivery.tag) for delivery in batch.deliveries]
            self._hold(tags)
            if self._drained_meanwhile():
                return None
            rows = {str(delivery.tag): delivery.rows for delivery in batch.deliveries}
            self.appetite.fetched(lane, batch.key, batch.priority_class, rows)
        return batch

    def take_one(self, lane: str) -> Batch | None:
        """Fetches and holds one message, whatever the appetite."""
        batch = self.store.fetch(lane, self.owner, rows=1, seats=1)
        if batch:
            self._hold([str(batch.deliveries[0].tag)])
        return batch

    def ack(self, tag: str) -> None:
        """The message is done with. Redis is told by the next `flush`, which whoever is awakened makes; where nobody
        would be, and once draining, it is told at once. An unreachable Redis is told later; a stale tag is refused
        and logged."""
        ending = _Ending(Tag.parse(tag), acked=True)
        if self.draining or not self._wakers:
            self._end(ending)
            return
        with self._lock:
            self._held.pop(tag, None)
            self._outbox[tag] = ending
        self._gone(tag)

    def flush(self) -> None:
        """Tells Redis the endings that wait, all acknowledgements in one round trip. Raises redis.RedisError."""
        with self._lock:
            waiting, self._outbox = self._outbox, {}
        try:
            self._tell_many(list(waiting.values()))
        except BaseException:
            with self._lock:  # what Redis has heard already it may hear again
                self._outbox = waiting | self._outbox
            raise

    def requeue(self, tag: str, *, counted: bool = True, due_us: int = 0) -> None:
        """The message goes back to its place, or waits until `due_us`."""
        self._end(_Ending(Tag.parse(tag), acked=False, counted=counted and not self.draining, due_us=due_us))

    def started(self, tag: str) -> bool:
        """A task starts on this delivery: `give_back` leaves it alone from now on.

        False when it is not held any more (given back, lost or ended): the task must not run.
        """
        with self._lock:
            if tag not in self._held:
                return False
            self._held[tag] = None
            return True

    def in_hand(self, lane: str | None = None) -> int:
        """Messages held, of one lane or of all."""
        with self._lock:
            return len(self._held) if lane is None else sum(Tag.parse(t).lane == lane for t in self._held)

    def give_back(self, *, everything: bool = False) -> int:
        """Fetches nothing from now on and returns, uncounted, what no task has started on. For SIGTERM.

        `everything`: also what was started. Returns how many went back; when Redis does not answer it gives
        up at once and leaves the rest to the heartbeat, or to the sweep of the others.
        """
        self.draining = True
        self._flush_quietly()
        with self._lock:
            tags = [tag for tag, due in self._held.items() if everything or due is not None]
            for tag in tags:
                del self._held[tag]
        endings = [_Ending(Tag.parse(tag), acked=False, counted=False) for tag in tags]
        for count, ending in enumerate(endings):
            if not self._deliver(ending):
                with self._lock:
                    self._outbox.update((str(left.tag), left) for left in endings[count:])
                return count
            self._gone(str(ending.tag))
        return len(endings)

    # --- life

    def beat(self) -> None:
        """One heartbeat: endings that wait, then new leases for what is alive. Raises redis.RedisError."""
        self.flush()
        for left in self._drop_unstarted():
            logger.warning("no task has taken %s up: it goes back", Tag.parse(left).id)
            self.requeue(left)
        with self._lock:
            held = list(self._held)
        lanes: dict[str, list[Tag]] = defaultdict(list)
        for tag in map(Tag.parse, held):
            lanes[tag.lane].append(tag)
        for lane, tags in lanes.items():
            for lost in self.store.extend(lane, self.owner, tags):
                self._lose(str(lost))

    def sweep(self, lane: str, dead_owner: str = "") -> int:
        """Brings back what nobody works on any more. Returns how many messages came back or became due."""
        returned, dead = self.store.sweep(lane, dead_owner)
        for tag in dead:
            logger.error("message %s of lane %s was delivered too often: it is a dead letter", tag, lane)
            for hook in self._dead_hooks:
                hook(lane, tag.partition("~")[0])
        return returned

    def close(self) -> None:
        """Ends the heartbeat, after the last endings were told. What is still held is swept by the others."""
        self._stop.set()
        if self._heart is not None:
            self._heart.join()
        self._flush_quietly()

    def heard(self) -> None:
        """The bell rang, or may have: there may be interactive messages again."""
        self._no_urgent.clear()

    # --- hooks

    def on_lost(self, hook: Callable[[str], None]) -> None:
        self._lost_hooks.append(hook)

    def on_dead(self, hook: Callable[[str, str], None]) -> None:
        self._dead_hooks.append(hook)

    def add_waker(self, waker: Callable[[], None]) -> None:
        self._wakers.add(waker)

    def remove_waker(self, waker: Callable[[], None]) -> None:
        self._wakers.discard(waker)

    def wake(self) -> None:
        """Look into the lanes again: there may be room now. From any thread."""
        for waker in tuple(self._wakers):
            waker()

    # --- inside

    def _fetch(self, lane: str, want: Want, free: int, common: int) -> Batch | None:
        """`free` seats for interactive messages, `common` of them for any."""
        batch, begin = None, want.rows > 0 and common > 0
        if begin or (want.room > 0 and common > 0):
            batch = self.store.fetch(
                lane, self.owner, rows=want.rows, seats=common, open_key=want.open_key, room=want.room
            )
        urgent = max(want.rows, want.urgent)
        if batch is None and not begin and free > 0 and urgent > 0 and lane not in self._no_urgent:
            batch = self.store.fetch(lane, self.owner, rows=urgent, seats=free, lowest_class=0)
            if batch is None and self._wakers:  # the bell will tell of the next one
                self._no_urgent.add(lane)
        return batch

    def _flush_quietly(self) -> None:
        from redis import RedisError

        try:
            self.flush()
        except RedisError as error:
            logger.warning("endings wait for Redis: %s", error)

    def _drop_unstarted(self) -> list[str]:
        """No longer held: a task that comes for one of them now finds it gone."""
        now = time.monotonic()
        with self._lock:
            left = [tag for tag, due in self._held.items() if due is not None and due < now]
            for tag in left:
                del self._held[tag]
        return left

    def _drained_meanwhile(self) -> bool:
        """Draining began while a fetch was under way: what it brought goes back too."""
        if self.draining:
            self.give_back()
        return self.draining

    def _hold(self, tags: list[str]) -> None:
        with self._lock:
            self._held.update(dict.fromkeys(tags, time.monotonic() + self.start_s))
            if self._heart is None and not self._stop.is_set():
                self._heart = threading.Thread(target=self._live, name="lane-heartbeat", daemon=True)
                self._heart.start()

    def _live(self) -> None:
        while not self._stop.wait(self.heartbeat_s):
            try:
                self.beat()
            except Exception:  # a failing hook or server must not end the heartbeat of all the rest
                logger.warning(
                    "heartbeat of the lanes failed, next in %.0f s", self.heartbeat_s, exc_info=True
                )

    def _end(self, ending: _Ending) -> None:
        tag = str(ending.tag)
        with self._lock:
            self._held.pop(tag, None)
        self._deliver(ending)
        self._gone(tag)

    def _deliver(self, ending: _Ending) -> bool:
        """Tells Redis, or keeps it for the heartbeat to tell. Returns whether Redis was told."""
        from redis import RedisError

        try:
            self._tell(ending)
        except RedisError as error:
            logger.warning("ending of %s waits for Redis: %s", ending.tag.id, error)
            with self._lock:
                self._outbox[str(ending.tag)] = ending
            return False
        return True

    def _tell(self, ending: _Ending) -> None:
        if ending.acked:
            outcome = self.store.ack(ending.tag)
        else:
            outcome = self.store.requeue(ending.tag, counted=ending.counted, due_us=ending.due_us)
        self._told(ending, outcome)

    def _tell_many(self, endings: list[_Ending]) -> None:
        acked = [ending for ending in endings if ending.acked]
        for ending, outcome in zip(acked, self.store.ack_many([one.tag for one in acked]), strict=True):
            self._told(ending, outcome)
        for ending in endings:
            if not ending.acked:
                self._tell(ending)

    def _told(self, ending: _Ending, outcome: Outcome) -> None:
        if outcome is Outcome.STALE:
            logger.warning("ending of %s refused: it was delivered again or given back", ending.tag.id)
        elif outcome is Outcome.DEAD:
            for hook in self._dead_hooks:
                hook(ending.tag.lane, ending.tag.id.partition("~")[0])

    def _lose(self, tag: str) -> None:
        # An ending may have come between the snapshot of the heartbeat and its answer: that one is not lost.
        with self._lock:
            if self._held.pop(tag, None) is None:
                return
        logger.warning("lease of %s lost", Tag.parse(tag).id)
        for hook in self._lost_hooks:
            hook(tag)
        self._gone(tag)

    def _gone(self, tag: str) -> None:
        self.appetite.gone(tag)
        self.wake()
