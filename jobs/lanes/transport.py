"""The kombu transport `saggar://`: kombu's Redis transport, with lanes where a queue's name says so.

Queues named gen.* are lanes; every other queue, fanout and remote control are kombu's own and untouched.
Options (`broker_transport_options`) besides kombu's: `appetite` (see appetite.py), `urgent_seats`,
`lane_poll_s`, `lane_heartbeat_s`. What it touches of kombu's private parts is held by
tests/jobs/lanes/test_kombu_contract.py.
"""

import logging
from collections.abc import Callable
from queue import Empty
from time import monotonic
from typing import Any

from kombu.transport import redis as kombu_redis
from kombu.transport import virtual
from kombu.utils.json import dumps, loads
from saggar.jobs.lanes.appetite import Appetite
from saggar.jobs.lanes.broker import process_lanes
from saggar.jobs.lanes.hub import HubPump
from saggar.jobs.lanes.lanes import Lanes
from saggar.jobs.lanes.message import LANE_PREFIX, SEPARATOR, inflate, lane_message
from saggar.jobs.lanes.script import script
from saggar.jobs.lanes.store import Batch

logger = logging.getLogger(__name__)
_SYNC_POLL_S = 0.1


class QoS(kombu_redis.QoS):  # type: ignore[misc]
    """Deliveries of lanes are held by the process and end there; the others are kombu's."""

    def append(self, message: Any, delivery_tag: str) -> None:
        if SEPARATOR in delivery_tag:
            virtual.QoS.append(self, message, delivery_tag)
        else:
            super().append(message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        if SEPARATOR not in delivery_tag:
            super().ack(delivery_tag)
            return
        virtual.QoS.ack(self, delivery_tag)
        self.channel.lanes.ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if SEPARATOR not in delivery_tag:
            super().reject(delivery_tag, requeue=requeue)
            return
        virtual.QoS.ack(self, delivery_tag)
        if requeue:
            self.channel.lanes.requeue(delivery_tag)
        else:
            self.channel.lanes.ack(delivery_tag)

    def restore_unacked(self, client: Any = None) -> None:
        """A channel closes. What it took from lanes stays with the process, where tasks still run on it."""
        self._flush()
        for tag in [tag for tag in self._delivered if SEPARATOR in tag]:
            del self._delivered[tag]
        if not self._delivered:
            return
        try:
            super().restore_unacked(client)
        except self.channel.connection_errors as error:
            # The connection is what was lost: they come back when their visibility timeout is over.
            logger.warning("%d messages could not be restored: %s", len(self._delivered), error)
            self._delivered.clear()


class Channel(kombu_redis.Channel):  # type: ignore[misc]
    """A channel that puts into and fetches from lanes. `appetite` None: what the prefetch limit allows."""

    QoS = QoS
    appetite: Appetite | None = None
    urgent_seats = 2
    lane_poll_s = 1.0
    lane_heartbeat_s = 3.0
    from_transport_options = (
        *kombu_redis.Channel.from_transport_options,
        "appetite",
        "urgent_seats",
        "lane_poll_s",
        "lane_heartbeat_s",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._own_lanes: Lanes | None = None
        super().__init__(*args, **kwargs)

    @property
    def lanes(self) -> Lanes:
        """The process's, not the channel's own."""
        if self._own_lanes is None:
            self._own_lanes = process_lanes(
                self._connparams(), self.global_keyprefix, self.lane_heartbeat_s, self.urgent_seats
            )
            if self.appetite is not None:
                self._own_lanes.appetite = self.appetite
        return self._own_lanes

    def _after_fork(self) -> None:
        super()._after_fork()
        self._own_lanes = None

    @staticmethod
    def is_lane(queue: str) -> bool:
        return queue.startswith(LANE_PREFIX)

    @property
    def active_queues(self) -> list[str]:
        """Those that kombu's own polling serves."""
        return [queue for queue in super().active_queues if not self.is_lane(queue)]

    @property
    def active_lanes(self) -> list[str]:
        return [queue for queue in dict.fromkeys(self._active_queues) if self.is_lane(queue)]

    def pump(self) -> int:
        """Delivers what the appetite wants, in the thread that consumes. Returns how many messages."""
        count = 0
        for lane in self.active_lanes:
            while lane in self._active_queues and (batch := self.lanes.take(lane, self.qos.prefetch_count)):
                self._deliver_batch(batch, lane)
                count += len(batch.deliveries)
        return count

    def _deliver_batch(self, batch: Batch, lane: str) -> None:
        payloads = [_payload(batch, i) for i in range(len(batch.deliveries))]
        for i, payload in enumerate(payloads):
            try:
                self.connection._deliver(payload, lane)
            except BaseException:
                # Nobody has received the rest: it must not stay in the hands of this process.
                for delivery in batch.deliveries[i:]:
                    self.lanes.requeue(str(delivery.tag), counted=False)
                raise

    def _get(self, queue: str) -> Any:
        if not self.is_lane(queue):
            return super()._get(queue)
        batch = self.lanes.take_one(queue)
        if batch is None:
            raise Empty
        return _payload(batch, 0)

    def _put(self, queue: str, message: Any, **kwargs: Any) -> None:
        if not self.is_lane(queue):
            super()._put(queue, message, **kwargs)
            return
        placed = lane_message(queue, message, dumps(message))
        publish_batch = kwargs.get("_publish_batch")
        if publish_batch is None:
            self.lanes.put(placed)
        else:
            # EVAL, for an unknown EVALSHA would fail the whole batch. kombu adds no key prefix to it.
            base = self.lanes.store.base(queue)
            publish_batch.add("eval", script("put"), 1, base, *placed.args())

    def _size(self, queue: str) -> int:
        if not self.is_lane(queue):
            return int(super()._size(queue))
        size = self.lanes.store.size(queue)
        return size.waiting + size.delayed

    def _purge(self, queue: str) -> int:
        return self.lanes.store.purge(queue) if self.is_lane(queue) else int(super()._purge(queue))

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return self.is_lane(queue) or bool(super()._has_queue(queue, **kwargs))

    def _delete(self, queue: str, *args: Any, **kwargs: Any) -> None:
        super()._delete(queue, *args, **kwargs)
        if self.is_lane(queue):
            self.lanes.store.purge(queue, everything=True)


def _payload(batch: Batch, index: int) -> Any:
    delivery = batch.deliveries[index]
    return inflate(loads(delivery.body), delivery.tag, batch.priority_class, batch.key, delivery.rows)


class Poller(kombu_redis.MultiChannelPoller):  # type: ignore[misc]
    """The way without an event loop (`drain_events`): lanes and kombu's queues in turn, ten times a second.

    No bell is heard here: workers have an event loop.
    """

    def __init__(self) -> None:
        super().__init__()
        self._swept_at = 0.0

    @property
    def channels(self) -> list[Channel]:
        return list(self._channels)

    def get(self, callback: Callable[..., None], timeout: float | None = None) -> None:
        channels = [channel for channel in self.channels if channel.active_lanes]
        if not channels:
            super().get(callback, timeout)
            return
        if monotonic() - self._swept_at >= 1.0:
            self._swept_at = monotonic()
            for channel in channels:
                for lane in channel.active_lanes:
                    channel.lanes.sweep(lane)
        if not sum(channel.pump() for channel in channels):
            super().get(callback, min(_SYNC_POLL_S, _SYNC_POLL_S if timeout is None else timeout))


class Transport(kombu_redis.Transport):  # type: ignore[misc]
    """kombu's Redis transport, its channels with lanes, its event loop with a pump."""

    Channel = Channel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cycle = Poller()
        self._pump: HubPump | None = None

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        super().register_with_event_loop(connection, loop)
        self._close_pump()
        options = connection.client.transport_options
        self._pump = HubPump(self.cycle, loop, float(options.get("lane_poll_s", Channel.lane_poll_s)))

    def close_connection(self, connection: Any) -> None:
        self._close_pump()
        super().close_connection(connection)

    def _close_pump(self) -> None:
        if self._pump is not None:
            self._pump.close()
            self._pump = None
