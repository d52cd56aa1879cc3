"""Feeding the lanes from Celery's event loop: when the bell rings, when there is room, once a second.

The hub's ways that this goes by: `call_soon` from another thread ends its wait at once, but called in its own
thread it is not seen before the next wait ends (up to a second). So whoever wants a look sets a flag, and
the flag is looked at in `on_tick`, which runs before every wait.
"""

import logging
import socket
from typing import TYPE_CHECKING, Any

from redis import RedisError, ResponseError
from saggar.jobs.lanes.bell import Bell
from saggar.jobs.lanes.lanes import Lanes

if TYPE_CHECKING:
    from saggar.jobs.lanes.transport import Channel, Poller

logger = logging.getLogger(__name__)


class HubPump:
    """Lives from a transport's registration with the hub until its connection closes.

    All in the hub's thread, except `kick`. Connection errors go to Celery, which connects anew; what Redis
    refuses (it is full) is logged and tried again a second later, for it must not end the worker.
    """

    def __init__(self, poller: "Poller", hub: Any, poll_s: float) -> None:
        self._poller = poller
        self._hub = hub
        self._bells: dict[Lanes, Bell] = {}
        self._watched: dict[Lanes, tuple[socket.socket, int]] = {}  # its number is gone when it is closed
        self._wanted = True
        self._pumping = False
        hub.on_tick.add(self._tick)
        self._timers = [hub.call_repeatedly(poll_s, self._look), hub.call_repeatedly(1.0, self._sweep)]

    def kick(self) -> None:
        """Look into the lanes soon. From any thread."""
        if not self._wanted:
            self._wanted = True
            self._hub.call_soon(_nothing)

    def close(self) -> None:
        self._hub.on_tick.discard(self._tick)
        for timer in self._timers:
            timer.cancel()
        for lanes in tuple(self._bells):
            self._hang_up(lanes)

    def _channels(self) -> "list[Channel]":
        return [channel for channel in self._poller.channels if channel.active_lanes]

    def _look(self) -> None:
        for lanes in self._bells:
            lanes.heard()
        self._wanted = True

    def _tick(self) -> None:
        while self._wanted and not self._pumping:
            self._wanted = False
            self._pump()

    def _pump(self) -> None:
        self._pumping = True
        try:
            for channel in self._channels():
                self._listen(channel)
                channel.lanes.flush()
                channel.pump()
        except ResponseError as error:
            logger.error("lanes: Redis refuses, next try in a second: %s", error)
        finally:
            self._pumping = False

    def _sweep(self) -> None:
        try:
            for channel in self._channels():
                for lane in channel.active_lanes:
                    if channel.lanes.sweep(lane):
                        self._wanted = True
        except ResponseError as error:
            logger.error("lanes: Redis refuses the sweep: %s", error)

    # --- the bell

    def _listen(self, channel: "Channel") -> None:
        lanes = channel.lanes
        if lanes not in self._bells:
            self._bells[lanes] = Bell(lanes.store)
            lanes.add_waker(self.kick)
        self._bells[lanes].listen(
            lane for c in self._channels() if c.lanes is lanes for lane in c.active_lanes
        )
        self._watch(lanes)

    def _heard(self, lanes: Lanes) -> None:
        try:
            rung = self._bells[lanes].heard()
        except (RedisError, OSError) as error:
            logger.warning("lanes: the bell's connection is lost: %s", error)
            self._hang_up(lanes)
            lanes.heard()
            self._wanted = True  # which also makes another bell
            return
        # A connection made anew by redis-py may have missed a ring.
        if self._watch(lanes) or rung:
            lanes.heard()
            self._wanted = True

    def _watch(self, lanes: Lanes) -> bool:
        """The hub watches the bell's socket. True when it is another than before, perhaps of the same number."""
        sock = self._bells[lanes].socket
        watched, _ = self._watched.get(lanes, (None, -1))
        if sock is watched:
            return False
        self._unwatch(lanes)
        if sock is not None:
            self._watched[lanes] = sock, sock.fileno()
            self._hub.add_reader(sock.fileno(), self._heard, lanes)
        return True

    def _unwatch(self, lanes: Lanes) -> None:
        if lanes in self._watched:
            _, number = self._watched.pop(lanes)
            self._hub.remove(number)

    def _hang_up(self, lanes: Lanes) -> None:
        lanes.remove_waker(self.kick)
        self._unwatch(lanes)
        self._bells.pop(lanes).close()


def _nothing() -> None:
    """Ends the hub's wait."""
