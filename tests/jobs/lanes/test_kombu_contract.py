"""One test for each private part of kombu 5.7 that the transport stands on. If one fails, kombu has moved."""

from __future__ import annotations

import inspect
import json
import socket
import threading
import time

import pytest
import redis
from kombu import Connection, Exchange, Producer, Queue
from kombu.asynchronous import Hub
from kombu.exceptions import BatchPublishError
from kombu.transport import TRANSPORT_ALIASES, virtual
from kombu.transport import redis as kombu_redis
from kombu.utils.json import dumps
from saggar.jobs.lanes import LateAppetite, Tag, broker_url, register
from saggar.jobs.lanes.broker import broker_use_ssl
from saggar.jobs.lanes.message import SEPARATOR

from tests.jobs.lanes.invariants import snapshot

pytestmark = pytest.mark.e2e
LANE = "gen.m"
lane_queue = Queue(LANE, Exchange(LANE), routing_key=LANE)
plain_queue = Queue("chores", Exchange("chores"), routing_key="chores")


@pytest.fixture
def connection(redis_url):
    register()
    # Without its timer: only the bell and the waker can bring a message to the event loop.
    options = {"global_keyprefix": "p:", "lane_poll_s": 3600}
    connection = Connection(broker_url(redis_url), transport_options=options)
    yield connection
    connection.default_channel.lanes.give_back(everything=True)
    connection.release()


@pytest.fixture
def client(redis_url):
    client = redis.Redis.from_url(redis_url, decode_responses=True)
    yield client
    client.close()


@pytest.fixture(autouse=True)
def fresh_lanes(monkeypatch):
    """Lanes are the process's: each test is a process of its own."""
    from saggar.jobs.lanes import broker

    monkeypatch.setattr(broker, "_lanes", {})


def publish(connection, queue=lane_queue, body="x", **headers):
    Producer(connection).publish(
        body,
        exchange=queue.exchange,
        routing_key=queue.routing_key,
        declare=[queue],
        headers={"id": body, "task": "t", **headers},
    )


class Consuming:
    """A consumer of both kinds of queues that acknowledges nothing by itself."""

    def __init__(self, connection, queues=(lane_queue, plain_queue), prefetch=0):
        self.messages = []
        self.channel = connection.channel()
        self.channel.basic_qos(0, prefetch, False)
        self.consumer = connection.Consumer(
            list(queues), channel=self.channel, on_message=self.messages.append, accept=["json", "text/plain"]
        )
        self.consumer.consume()

    @property
    def bodies(self):
        return [message.payload for message in self.messages]


def drain(connection, seen, count, deadline_s=10.0):
    start = time.monotonic()
    while len(seen.messages) < count:
        assert time.monotonic() - start < deadline_s
        try:
            connection.drain_events(timeout=0.2)
        except socket.timeout:  # noqa: UP041 - kombu's word
            continue


# --- putting


def test_put_takes_a_publish_batch(connection, client):
    """Channel._put(queue, message, _publish_batch=...), PublishBatch.add(command, *args), EVAL without prefix."""
    assert "kwargs" in inspect.signature(kombu_redis.Channel._put).parameters
    assert list(inspect.signature(kombu_redis.PublishBatch.add).parameters) == ["self", "name", "args"]
    producer = Producer(connection)
    with producer.batch(10):
        for i in range(25):
            producer.publish(f"{i}", exchange="", routing_key=LANE, headers={"id": f"{i}"})
        producer.publish("c", exchange="", routing_key="chores")
        assert client.llen("p:chores") == 0  # buffered: this is a batch
    store = connection.default_channel.lanes.store
    assert len(snapshot(store, LANE).waiting) == 25
    assert client.llen("p:chores") == 1


def test_a_batch_that_fails_says_so(connection):
    """A refused script fails the batch loudly, as any command of kombu's does."""
    connection.default_channel.lanes.store.client.set("p:gen.m:m", "not a hash")
    producer = Producer(connection)
    with pytest.raises(BatchPublishError), producer.batch(10):
        producer.publish("x", exchange="", routing_key=LANE, headers={"id": "x"})


def test_a_publish_reaches_the_lane_by_its_headers(connection):
    publish(connection, body="a", lane_class="interactive", lane_key="k", lane_rows=3)
    record = snapshot(connection.default_channel.lanes.store, LANE).records["a"]
    assert (record["class"], record["key"], record["rows"]) == ("0", "k", "3")


# --- consuming


def test_active_queues_hide_lanes_from_brpop(connection):
    """Channel.active_queues is what BRPOP serves, `_active_queues` is all."""
    seen = Consuming(connection)
    assert seen.channel._active_queues == [LANE, "chores"]
    assert seen.channel.active_queues == ["chores"]
    assert seen.channel.active_lanes == [LANE]
    assert isinstance(kombu_redis.Channel.active_queues, property)


def test_without_an_event_loop(connection):
    """MultiChannelPoller.get(callback, timeout), `_channels`, Transport._deliver(message, queue)."""
    assert list(inspect.signature(kombu_redis.MultiChannelPoller.get).parameters) == [
        "self",
        "callback",
        "timeout",
    ]
    seen = Consuming(connection)
    publish(connection, body="lane")
    publish(connection, plain_queue, body="plain")
    drain(connection, seen, 2)
    assert sorted(seen.bodies) == ["lane", "plain"]
    for message in seen.messages:
        message.ack()
    assert connection.default_channel.lanes.in_hand() == 0


def test_deliver_calls_the_queues_callback_in_order(connection):
    seen = Consuming(connection)
    for i in range(12):
        publish(connection, body=f"{i:02}", lane_key="k")
    drain(connection, seen, 12)
    assert seen.bodies == [f"{i:02}" for i in range(12)]
    tag = Tag.parse(seen.messages[0].delivery_tag)
    assert tag == Tag(LANE, "00", 1)
    assert seen.messages[0].properties["delivery_tag"] == str(tag)  # a task finds it in its request


def test_an_undeliverable_message_does_not_stay_in_hand(connection):
    """Transport._deliver raises what the callback raises."""

    def fail(message):
        raise LookupError("the callback's fault")

    seen = Consuming(connection)
    seen.consumer.on_message = fail
    for body in "ab":
        publish(connection, body=body, lane_key="k")
    with pytest.raises(LookupError):
        drain(connection, seen, 1)
    lane = snapshot(connection.default_channel.lanes.store, LANE)
    assert lane.waiting == {"a", "b"}
    assert all(record["free"] == "1" for record in lane.records.values())


def test_get_size_purge_and_existence(connection):
    """Channel._get, _size, _purge, _has_queue: the queue's methods of kombu."""
    bound = lane_queue(connection.default_channel)
    bound.declare()
    for body in "abc":
        publish(connection, body=body)
    assert bound.queue_declare(passive=True).message_count == 3
    message = bound.get()
    assert message.payload == "a"
    message.ack()
    assert bound.get(no_ack=False).payload == "b"
    assert bound.purge() == 1
    assert bound.get() is None


def test_deleting_a_queue_empties_its_lane(connection, client):
    """Channel._delete(queue, exchange, routing_key, pattern)."""
    bound = lane_queue(connection.default_channel)
    bound.declare()
    publish(connection)
    bound.delete()
    assert not client.exists("p:gen.m:m")
    assert not client.exists("p:_kombu.binding.gen.m")


# --- acknowledging


def test_qos_keeps_its_books(connection):
    """QoS.append, _delivered, _dirty, _flush, can_consume: seats of the channel, not written to `unacked`."""
    seen = Consuming(connection, prefetch=2)
    for body in "abc":
        publish(connection, body=body, lane_key="k")
    drain(connection, seen, 2)
    qos = seen.channel.qos
    assert list(qos._delivered) == [message.delivery_tag for message in seen.messages]
    assert not qos.can_consume()
    assert not seen.channel.client.exists("p:unacked", "unacked")
    seen.messages[0].ack()
    assert qos._dirty == {seen.messages[0].delivery_tag}
    assert qos.can_consume()
    qos._flush()
    assert list(qos._delivered) == [seen.messages[1].delivery_tag]


def test_reject_and_requeue(connection):
    seen = Consuming(connection)
    publish(connection, body="a")
    drain(connection, seen, 1)
    seen.messages[0].requeue()
    drain(connection, seen, 2)
    assert seen.messages[1].delivery_info["redelivered"]
    seen.messages[1].reject()
    size = connection.default_channel.lanes.store.size(LANE)
    assert (size.waiting, size.leased) == (0, 0)


def test_closing_a_channel_leaves_the_work_with_the_process(connection):
    """QoS.restore_unacked runs when a channel closes; tasks may still run on what it delivered."""
    seen = Consuming(connection)
    publish(connection, body="lane")
    publish(connection, plain_queue, body="plain")
    drain(connection, seen, 2)
    lanes = seen.channel.lanes
    seen.channel.close()
    assert lanes.in_hand() == 1
    assert lanes.store.size(LANE).leased == 1
    again = Consuming(connection)
    drain(connection, again, 1)
    assert again.bodies == ["plain"]  # kombu's own are restored, as ever
    (message,) = [message for message in seen.messages if SEPARATOR in message.delivery_tag]
    lanes.ack(message.delivery_tag)
    assert lanes.store.size(LANE).leased == 0


def test_closing_over_a_lost_connection_does_not_raise(redis_server, redis_url):
    """restore_unacked of kombu's makes a new pool and connects: to nothing."""
    register()
    connection = Connection(broker_url(redis_url), transport_options={"socket_timeout": 1})
    seen = Consuming(connection)
    publish(connection, body="lane")
    publish(connection, plain_queue, body="plain")
    drain(connection, seen, 2)
    assert set(seen.channel.qos._delivered) == {message.delivery_tag for message in seen.messages}
    redis_server.kill()
    try:
        seen.channel.qos.restore_unacked()
        assert not seen.channel.qos._delivered
        connection.collect()
    finally:
        redis_server.start()


# --- the event loop


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.close()


def turn(hub, until, deadline_s=10.0):
    start = time.monotonic()
    while not until():
        assert time.monotonic() - start < deadline_s
        hub.run_once()
    return time.monotonic() - start


def test_with_an_event_loop(connection, hub):
    """Transport.register_with_event_loop(connection, loop), hub.on_tick, call_repeatedly, add_reader, remove."""
    seen = Consuming(connection)
    transport = connection.transport
    transport.register_with_event_loop(connection.connection, hub)
    publish(connection, body="before")
    turn(hub, lambda: seen.bodies == ["before"])
    turn(hub, lambda: connection.default_channel.lanes.store.client.exists("p:gen.m:h"))
    other = threading.Timer(0.1, publish, (connection.clone(),), {"body": "bell"})
    other.start()
    turn(hub, lambda: "bell" in seen.bodies)
    other.join()
    publish(connection, plain_queue, body="plain")
    turn(hub, lambda: "plain" in seen.bodies)
    timers = len(hub.timer.queue)
    transport._close_pump()
    assert not [tick for tick in hub.on_tick if "_tick" in repr(tick)]
    assert len(hub.timer.queue) <= timers


def test_a_waker_ends_the_wait_from_another_thread(connection, hub):
    """hub.call_soon from another thread interrupts the poll; the flag is pumped in on_tick."""
    seen = Consuming(connection, prefetch=1)
    connection.transport.register_with_event_loop(connection.connection, hub)
    for body in "ab":
        publish(connection, body=body)
    turn(hub, lambda: seen.bodies == ["a"])
    threading.Timer(0.1, seen.messages[0].ack).start()
    turn(hub, lambda: seen.bodies == ["a", "b"])


def test_the_bell_comes_back_after_its_connection_was_cut(connection, hub, client):
    seen = Consuming(connection, queues=[lane_queue])
    connection.transport.register_with_event_loop(connection.connection, hub)
    turn(hub, lambda: client.pubsub_numsub("p:gen.m:bell")[0][1] == 1)
    client.client_kill_filter(_type="pubsub")
    turn(hub, lambda: client.pubsub_numsub("p:gen.m:bell")[0][1] == 1)
    publish(connection, body="a")
    turn(hub, lambda: seen.bodies == ["a"])


def test_a_full_server_does_not_end_the_loop(connection, hub, monkeypatch, caplog):
    Consuming(connection)
    connection.transport.register_with_event_loop(connection.connection, hub)
    lanes = connection.default_channel.lanes

    def refuse(*args, **kwargs):
        raise redis.ResponseError("OOM command not allowed")

    with monkeypatch.context() as patch:
        patch.setattr(lanes.store, "fetch", refuse)
        turn(hub, lambda: "Redis refuses" in caplog.text)


# --- connecting


def test_the_alias_and_the_url(redis_url):
    register()
    register()
    assert TRANSPORT_ALIASES["saggar"] == "saggar.jobs.lanes.transport:Transport"
    connection = Connection(broker_url("redis://user:p%40ss@host:7000/3"))
    assert (connection.hostname, connection.port, connection.virtual_host) == ("host", 7000, "3")
    assert (connection.userid, connection.password) == ("user", "p@ss")
    assert connection.transport_cls == "saggar"
    assert broker_use_ssl("redis://h/0") is None
    assert broker_use_ssl("rediss://h/0?ssl_ca_certs=/ca") == {
        "ssl_cert_reqs": "required",
        "ssl_ca_certs": "/ca",
    }


def test_connparams_of_a_unix_socket():
    """Channel._connparams: what redis-py's pool is made of."""
    register()
    connection = Connection(broker_url("unix://:secret@/run/redis.sock?db=2"))
    channel = connection.transport_cls and connection.get_transport_cls().Channel
    stub = channel.__new__(channel)
    stub.connection = connection.transport
    params = stub._connparams()
    assert (params["path"], params["db"], params["password"]) == ("/run/redis.sock", 2, "secret")
    assert issubclass(params["connection_class"], redis.UnixDomainSocketConnection)


def test_lanes_belong_to_the_process(connection, redis_url):
    one, two = connection.channel(), connection.clone().channel()
    assert one.lanes is two.lanes
    assert one.lanes.store.prefix == "p:"
    assert connection.default_channel.lanes.store.client.connection_pool is not one.pool
    other = Connection(broker_url(redis_url), transport_options={"global_keyprefix": "q:"}).channel()
    assert other.lanes is not one.lanes


def test_an_appetite_survives_remote_control():
    """kombu's JSON asks an object for __json__: `inspect stats` sends the transport's options."""
    assert json.loads(dumps({"appetite": LateAppetite()})) == {"appetite": "NoneType"}


def test_virtual_message_shape():
    """What virtual.Message reads from a payload: all that `inflate` must provide."""
    source = inspect.getsource(virtual.Message.__init__)
    assert "properties['delivery_tag']" in source
    assert "payload.get('content-type')" in source
    assert "body_encoding" in source
